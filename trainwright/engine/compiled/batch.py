"""Which parts of a batch enter a program as tensors, and which are constants."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from trainwright._torch_compat import batch_tree
from trainwright.engine.compiled.errors import NotCapturable

_PLAIN = (bool, int, float, str, type(None))


class Layout:
    """How a batch is taken apart, and rebuilt inside a program.

    ``take(batch)`` returns its tensors, or None for a batch of another structure; ``rebuild(tensors)`` is the inverse.
    """

    def __init__(self, take: Callable[[Any], Sequence[Any] | None], rebuild: Callable[[Sequence[Tensor]], Any]) -> None:
        self.take = take
        self.rebuild = rebuild


def layout_of(batch: Any, names: Iterable[str] | None = None) -> Layout:
    """The layout of batches like this one.

    ``names``: the fields that are read; of others only tensors are included. None: all.

    Raises:
        NotCapturable: it holds a value that is not a tensor, plain number, text or None.
    """
    if type(batch) in (tuple, list) and all(isinstance(value, Tensor) for value in batch):
        return _listed(type(batch), len(batch))
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        wanted = batch if names is None else {*names}
        fields = {name: value for name, value in batch.items() if name in wanted or isinstance(value, Tensor)}
        if all(isinstance(value, Tensor) for value in fields.values()):
            return _named(tuple(fields), {*batch}, is_all=len(fields) == len(batch))
        return _tree(fields, tuple(fields), {*batch})
    return _tree(batch, None, set())


def batch_size_of(loader: Any) -> int | None:
    """The number of samples of a full batch of the loader; None if it is unknown."""
    for holder in (getattr(loader, "batch_sampler", None), loader):
        for name in ("micro_batch_size", "batch_size"):
            size = getattr(holder, name, None)
            if isinstance(size, int):
                return size
    return None


def shapes_of(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """The properties that decide whether a program accepts these tensors."""
    return tuple((value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None for value in tensors)


def _listed(kind: type[Any], length: int) -> Layout:
    def take(batch: Any) -> Sequence[Any] | None:
        return [*batch] if batch.__class__ is kind and len(batch) == length else None

    return Layout(take, tuple if kind is tuple else list)


def _named(names: tuple[str, ...], known: Set[str], *, is_all: bool) -> Layout:
    """``known``: the fields that a batch may have, if it may have others than ``names``."""

    def take_all(batch: Any) -> Sequence[Any] | None:
        return [*batch.values()] if isinstance(batch, Mapping) and tuple(batch) == names else None

    def take(batch: Any) -> Sequence[Any] | None:
        if not isinstance(batch, Mapping) or not batch.keys() <= known:  # a new field may be read
            return None
        try:
            return [batch[name] for name in names]
        except KeyError:
            return None

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        return dict(zip(names, tensors, strict=True))

    return Layout(take_all if is_all else take, rebuild)


def _tree(batch: Any, names: tuple[str, ...] | None, known: Set[str]) -> Layout:
    leaves, spec = batch_tree.flatten(batch)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    constants = [leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if not is_one]
    kinds = [*map(type, constants)]
    for constant in constants:
        if not isinstance(constant, _PLAIN):
            kind = type(constant).__name__
            raise NotCapturable(f"the batch holds a {kind}; a program takes tensors, and plain numbers and texts")

    def take(batch: Any) -> Sequence[Any] | None:
        if names is not None:
            if not isinstance(batch, Mapping) or not (batch.keys() <= known and all(name in batch for name in names)):
                return None
            batch = {name: batch[name] for name in names}
        leaves, found = batch_tree.flatten(batch)
        fixed = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if found != spec or constants != fixed or kinds != [*map(type, fixed)]:  # 1 == True, but they differ
            return None
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        parts, fixed = iter(tensors), iter(constants)
        return batch_tree.unflatten([next(parts) if is_one else next(fixed) for is_one in is_tensor], spec)

    return Layout(take, rebuild)

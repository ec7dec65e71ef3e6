"""The start of a model on the meta device: the processes divide it, then each one allocates and fills its own part.

The values are those that one process computes: every process initialises one block after another, complete and with the
same random numbers, and keeps its part. Tensors that nothing has filled are recognised by their bytes.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright._torch_compat.tensor_chunks import chunk_of, is_dtensor, local_of
from trainwright.base.dist import all_gather_object, broadcast_object, raised_together
from trainwright.base.errors import ConfigError
from trainwright.base.signatures import read_signature
from trainwright.parallel.recompute import repeated_blocks
from trainwright.parallel.simulated import simulation

logger = logging.getLogger("trainwright.parallel")

_NO_VALUE = 0xAB  # each byte of a tensor without values
_TORCHS = ("reset_parameters", "_reset_parameters")  # methods of modules


def is_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device: it has a shape, but no memory."""
    return tensor.device.type == "meta"


def has_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of a module is on the meta device."""
    return any(is_meta(tensor) for owner in module.modules() for tensor in _own(owner).values())


def shell_of(model: nn.Module) -> nn.Module:
    """Other module objects with the same parameters, buffers and attributes."""
    shared = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        shared += [value for value in vars(module).values() if not isinstance(value, dict | list | set | nn.Module)]
    return copy.deepcopy(model, {id(value): value for value in shared})


def allocate(parts: Iterable[nn.Module], device: torch.device, home: torch.device) -> None:
    """Give the tensors of ``parts`` that are on the meta device memory on ``device``, parameters on ``home``.

    Tied ones stay tied.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old ones, too: they keep their identities
    for module in dict.fromkeys(module for part in parts for module in part.modules()):
        for name, tensor in _own(module).items():
            if is_meta(tensor):
                if id(tensor) not in made:
                    place = home if isinstance(tensor, nn.Parameter) else device
                    made[id(tensor)] = tensor, _allocated(tensor, place)
                setattr(module, name, made[id(tensor)][1])


def initialize(
    complete: nn.Module, parts: Iterable[nn.Module], device: torch.device, generators: tuple[Tensor, Tensor | None]
) -> None:
    """Fill what is empty of ``parts`` with this process's part of the initial values of ``complete``.

    Each module is initialised by its ``reset_parameters``, then by the ``_init_weights(module)`` of the model that
    contains it, as in transformers: all of them where a parameter is empty, so that it gets the numbers that it always
    gets; otherwise those with empty buffers. Every process must call this.

    Args:
        parts: allocated tensors; those with values, as after loading, keep them.
        complete: the model before it was divided, which stays on the meta device.
        generators: those of :func:`states_of_generators`; all processes draw the numbers of the first one.
    """
    targets: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in _named(part):
            if simulation() is not None or not _has_values(tensor):
                targets.setdefault(name, []).append(tensor)
    empty = {name for found in all_gather_object([*targets]) for name in found}
    if not empty:
        return
    names: dict[int, list[str]] = {}
    for name, tensor in _named(complete):
        names.setdefault(id(tensor), []).append(name)
    only = {id(tensor) for name, tensor in _named(complete) if name in empty}
    if not only.isdisjoint(map(id, complete.parameters())):
        only = set(names)
    logger.info("%s: initial values by the reset_parameters and _init_weights of its modules.", type(complete).__name__)
    together: list[nn.Module] = []
    while True:
        try:
            with _random_numbers_of_first(device, generators), torch.no_grad():
                _fill(
                    complete,
                    device,
                    only,
                    together,
                    lambda tensor: [t for n in names[id(tensor)] for t in targets.get(n, ())],
                )
            return
        except _UsesPartsError as error:
            together.append(error.module)
            logger.warning(
                "%s initialises parameters of the modules in it, so all of them are in memory at once for that time.",
                type(error.module).__name__,
            )


def check_filled(model: nn.Module) -> None:
    """Raise if a tensor of a model that was on the meta device has no values. Every process must call this."""
    with raised_together():
        faults = []
        for name, module in model.named_modules():
            others = {key: value for key, value in vars(module).items() if isinstance(value, Tensor) and is_meta(value)}
            empty = [key for key, tensor in {**_own(module), **others}.items() if not _has_values(tensor)]
            if empty:
                faults.append(f"{name or type(model).__name__} ({type(module).__name__}): {', '.join(empty)}")
        if faults:
            raise ConfigError(
                f"{type(model).__name__} was built on the meta device, and nothing gives these tensors values: neither"
                " reset_parameters of their module, _init_weights of the model, nor loaded weights.\n  "
                + "\n  ".join([*faults[:10], *(["…"] if len(faults) > 10 else [])])
                + "\nGive the module a reset_parameters that sets them, or build the model without the meta device."
            )


class _UsesPartsError(Exception):
    """A module has initialised parameters of modules in it, which are not allocated at this time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class _RefusesMeta(TorchFunctionMode):
    """Raises if a function gets a tensor on the meta device, on which it would have no effect."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = getattr(function, "__name__", "") == "__get__"  # such as a shape
        kwargs = kwargs or {}
        if not is_attribute and any(isinstance(one, Tensor) and is_meta(one) for one in (*args, *kwargs.values())):
            raise _UsesPartsError(self._module)
        return function(*args, **kwargs)


def _fill(
    complete: nn.Module,
    device: torch.device,
    only: set[int],
    together: list[nn.Module],
    targets_of: Callable[[Tensor], list[Tensor]],
) -> None:
    filled = set[int]()
    models = _models_with_initializers(complete)

    def fill(modules: list[nn.Module]) -> None:
        if not any(one in together for one in modules):
            modules = [one for one in modules if not only.isdisjoint(map(id, _own(one).values()))]
        on_meta = [module for module in modules if has_meta(module)]
        with _in_memory(modules, device) as pairs:
            for module in on_meta:
                with _RefusesMeta(module):
                    for initializer in _initializers(module, models.get(module)):
                        initializer()
            for meta, values in pairs:
                # A tied tensor has the values of the first module that has it, as where the second one is tied to it.
                if is_meta(meta) and id(meta) not in filled and _has_values(values):
                    filled.add(id(meta))
                    for target in targets_of(meta):
                        _copy_part(target, values)

    for modules in _allocated_together(complete, {*repeated_blocks(complete)}, together):
        fill(modules)  # a function, so that a block is freed before the next one is allocated


def _allocated_together(
    module: nn.Module, blocks: set[nn.Module], together: list[nn.Module]
) -> Iterator[list[nn.Module]]:
    """Lists of modules, all in the order of ``nn.Module.apply``: each block, and what contains no blocks, is one."""
    if module in blocks or module in together or not any(inner in blocks for inner in module.modules()):
        found: list[nn.Module] = []
        module.apply(found.append)
        yield [*dict.fromkeys(found)]
        return
    for child in module.children():
        yield from _allocated_together(child, blocks, together)
    yield [module]


@contextmanager
def _in_memory(modules: Iterable[nn.Module], device: torch.device) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """A context in which modules have complete tensors on ``device``; pairs of a tensor and that in its place."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    places = [(module, name, tensor) for module in modules for name, tensor in _own(module).items()]
    for module, name, tensor in places:
        if id(tensor) not in pairs:
            pairs[id(tensor)] = tensor, _allocated(tensor, device)
            if not is_meta(tensor):  # it has its values; those that the module sets are not used
                pairs[id(tensor)][1].detach().copy_(tensor)
        setattr(module, name, pairs[id(tensor)][1])
    try:
        yield [*pairs.values()]
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _models_with_initializers(complete: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module the innermost model around it that has ``_init_weights(module)``."""
    found: dict[nn.Module, nn.Module] = {}
    for module in complete.modules():  # those outside come first
        method = getattr(module, "_init_weights", None)
        if callable(method) and len(read_signature(method).parameters) == 1:
            found |= dict.fromkeys(module.modules(), module)
    return found


def _initializers(module: nn.Module, model: Any) -> Iterator[Callable[[], object]]:
    method = next((getattr(module, name) for name in _TORCHS if callable(getattr(module, name, None))), None)
    if method is not None:
        yield method
    if model is not None:
        yield lambda: model._init_weights(module)


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself."""
    return dict([*module.named_parameters(recurse=False, remove_duplicate=False), *module.named_buffers(recurse=False)])


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    with torch.no_grad():
        made = torch.empty_like(tensor, device=device)
    if simulation() is None:
        memory = local_of(made).untyped_storage()
        torch.empty(0, dtype=torch.uint8, device=device).set_(memory).fill_(_NO_VALUE)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _has_values(tensor: Tensor) -> bool:
    """Whether something has filled a tensor of :func:`_allocated`, judged by its first and its last values."""
    if is_meta(tensor):
        return False
    values = local_of(tensor).detach()
    if simulation() is not None or not values.numel():
        return True
    places = values.contiguous().flatten().view(torch.uint8)
    return not any(bool((end == _NO_VALUE).all()) for end in (places[:8], places[-8:]))


def _copy_part(target: Tensor, values: Tensor) -> None:
    if simulation() is not None:
        return
    if not is_dtensor(target):
        target.detach().copy_(values)
        return
    offset, local = chunk_of(target)
    for dim, (first, size) in enumerate(zip(offset, local.shape, strict=True)):
        values = values.narrow(dim, min(first, values.shape[dim]), size)
    local.copy_(values)


def states_of_generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the CPU's random generator, and that of another device."""
    is_cpu = device.type == "cpu" or simulation() is not None
    return torch.get_rng_state(), None if is_cpu else torch.get_device_module(device).get_rng_state(device)


@contextmanager
def _random_numbers_of_first(device: torch.device, generators: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """A context in which all processes draw the numbers of the first one's ``generators``; later ones are as before."""
    if simulation() is not None:
        yield
        return
    on_cpu, on_device = broadcast_object(generators)
    devices: dict[str, Any] = {"devices": [] if on_device is None else [device]}
    with torch.random.fork_rng(**devices, device_type="cuda" if on_device is None else device.type):
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.get_device_module(device).set_rng_state(on_device, device)
        yield


def built_on(*, meta: bool) -> AbstractContextManager[Any]:
    """A context in which new tensors are on the meta device, if ``meta``."""
    return torch.device("meta") if meta else nullcontext()

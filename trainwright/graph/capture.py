"""Capture the tensor operations from a batch to its loss, and check that they still apply.

TorchDynamo reads the Python from a batch to its loss and returns its tensor operations as one graph, with guards: the
state of the model, its settings and the process for which the graph is valid. The graph is then called without that
Python, so the guards are checked before each step.
"""

import itertools
import linecache
import operator
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainwright.graph.dynamo import argument_sources, guard_check, run_captured, written_sources


class NotCapturable(Exception):  # noqa: N818  # not a user's error: the run continues eagerly
    """The step stays eager. The text names the operation and the reason, without a final period."""


class NotReady(Exception):  # noqa: N818
    """The optimizer has not created its state yet: the next step must be eager."""


def reason(error: BaseException) -> str:
    """A compiler's error in one line: the reason, and the place in the user's code."""
    if isinstance(error, NotCapturable):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    for line in lines[1:]:
        if line.startswith("Explanation:"):
            text = f"{text}: {line.removeprefix('Explanation:').strip()}"
            break
    frames = [
        frame for frame in getattr(error, "real_stack", None) or () if "/trainwright/engine/" not in frame.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if not where and isinstance(error, _UNEXPLAINED):
        return f"the forward pass {_trace_failure(error, text)}"
    return f"{text.rstrip('.')}{where}"[:400]


def trace_reason(error: BaseException) -> str:
    """Why the operations of an update could not be traced: which operation, and where torch failed."""
    text = str(error) if isinstance(error, _UNEXPLAINED) else reason(error)
    return f"{_operation(error)} {_trace_failure(error, text)}"


# Errors without an explanation, possibly of torch: the text alone is not informative.
_UNEXPLAINED = (AssertionError, AttributeError, LookupError, NameError, TypeError)


def _trace_failure(error: BaseException, text: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"could not be traced ({where}{(text or type(error).__name__).rstrip('.')})"[:400]


def _operation(error: BaseException) -> str:
    """The operation of the forward pass that raised an error, or the later part of the update."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.filename.startswith("<eval_with_key>"):  # the code of TorchDynamo's graph
            called = re.search(r"=\s*([\w.]+)\(", linecache.getline(frame.filename, frame.lineno or 0))
            return called[1].rpartition(".")[2] if called else "an operation of the forward pass"
    if any(Path(frame.filename).match("torch/autograd/__init__.py") for frame in frames):
        return "the backward pass"
    return "the update"


_PLAIN = (bool, int, float, str, type(None))


class BatchStructure(NamedTuple):
    """How a batch is taken apart, and rebuilt inside a program."""

    take: Callable[[Any], Sequence[Any] | None]  # the tensors of a batch; None for a batch of another structure
    rebuild: Callable[[Sequence[Tensor]], Any]  # the inverse


def structure_of(batch: Any, names: Iterable[str] | None = None) -> BatchStructure:
    """The structure of batches like this one.

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


def shapes_of(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """The properties that decide whether a program accepts these tensors."""
    return tuple((value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None for value in tensors)


def _listed(kind: type[Any], length: int) -> BatchStructure:
    def take(batch: Any) -> Sequence[Any] | None:
        return [*batch] if batch.__class__ is kind and len(batch) == length else None

    return BatchStructure(take, tuple if kind is tuple else list)


def _named(names: tuple[str, ...], known: Set[str], *, is_all: bool) -> BatchStructure:
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

    return BatchStructure(take_all if is_all else take, rebuild)


def _tree(batch: Any, names: tuple[str, ...] | None, known: Set[str]) -> BatchStructure:
    leaves, structure = tree_flatten(batch)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    constants = _constants(leaves)
    kinds = [*map(type, constants)]
    for kind in kinds:
        if not issubclass(kind, _PLAIN):
            raise NotCapturable(
                f"the batch holds a {kind.__name__}; a program takes tensors, and plain numbers and texts"
            )

    def take(batch: Any) -> Sequence[Any] | None:
        if names is not None:
            if not isinstance(batch, Mapping) or not (batch.keys() <= known and all(name in batch for name in names)):
                return None
            batch = {name: batch[name] for name in names}
        leaves, found = tree_flatten(batch)
        fixed = _constants(leaves)
        if found != structure or constants != fixed or kinds != [*map(type, fixed)]:  # 1 == True, but they differ
            return None
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        parts, fixed = iter(tensors), iter(constants)
        return tree_unflatten([next(parts) if is_one else next(fixed) for is_one in is_tensor], structure)

    return BatchStructure(take, rebuild)


def _constants(leaves: Iterable[Any]) -> list[Any]:
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


class _Names(dict[str, Any]):
    """Global names, including those that TorchDynamo makes for modules."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return now.keys() == before.keys() and all(
        value is before[key]
        or (type(value) is type(before[key]) and isinstance(value, _PLAIN) and value == before[key])
        for key, value in now.items()
    )


_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)

# (batch) -> loss, and further outputs of a step by name: tensors, and constants
LossOf = Callable[[Any], tuple[Tensor, Mapping[str, Any]]]


class Capture:
    """The operations of one forward pass.

    Attributes:
        graph: takes ``arguments``, returns a tuple.
        loss: the index of the loss in that tuple.
        outputs: the indices there of further outputs, by name; constants: those that are not tensors.
        places: which of the arguments are tensors of the batch, and which tensors.
        known: the other arguments, in their places: parameters, buffers and other tensors of the model.
    """

    def __init__(self, loss_of: LossOf, structure: BatchStructure, tensors: Sequence[Any]) -> None:
        """Capture ``loss_of``. Computes nothing, and draws no random numbers.

        Raises:
            NotCapturable: the Python code cannot be represented as a graph.
        """
        self._structure = structure
        self._forward = _forward_of(loss_of, structure.rebuild)
        self._scope = _scope_of(self._forward)
        self._found = found = dict[str, Any]()

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            found["graph"], found["sources"] = graph, argument_sources(graph)  # the sources are removed later
            num_outputs = len(_returned(graph))
            marks = [torch.empty(0) for _ in range(num_outputs)]

            def call(*arguments: Any) -> list[Tensor]:
                found["arguments"], found["marks"] = arguments, marks
                return marks

            return call

        returned = self._run(backend, tensors)
        if "marks" not in found:
            raise NotCapturable("the loss is not a function of tensors")
        self.graph: torch.fx.GraphModule = found["graph"]
        self._place_outputs(returned, found["marks"])
        self._place_arguments(found["arguments"], tensors, found["sources"])
        _check_operations(self.graph)
        found.clear()

    def arguments(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The graph's arguments for these tensors of a batch; None if the graph does not apply to this step."""
        scope = self._scope
        scope["tensors"] = tensors = tuple(tensors)
        if not self._holds(scope):
            return None
        arguments = [*eval(self._read, self._names)]
        if not all(map(operator.is_, arguments, self.known)):  # a replaced parameter, which the optimizer does not hold
            return None
        for place, index in self.places:
            arguments[place] = tensors[index]
        return arguments

    def _run(self, backend: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        try:
            returned = run_captured(self._forward, backend, tensors)
        except Exception as error:  # of the compiler, or of the code that it traces
            if not (sources := written_sources(error)):
                raise NotCapturable(reason(error)) from error
            returned = self._run_with_writes(sources, backend, tensors)
        self._holds = guard_check(self._forward)
        return returned

    def _run_with_writes(self, sources: list[str], backend: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Trace the forward pass again, and check that it leaves the objects that it writes to unchanged."""
        text, within = ", ".join(map(_short, sources)), {"L": self._scope, "G": _Names(self._forward.__globals__)}
        try:
            held = [
                found if isinstance(found, dict) else vars(found) for found in (eval(one, within) for one in sources)
            ]
            before = [one.copy() for one in held]
        except Exception as error:
            raise NotCapturable(f"the forward pass writes to {text}") from error
        if not all(isinstance(one, dict) for one in held):
            raise NotCapturable(f"the forward pass writes to {text}, a class")
        try:
            returned = run_captured(self._forward, backend, tensors, may_write=True)
        except Exception as error:
            raise NotCapturable(reason(error)) from error
        finally:
            now = [{key: self._written_in_place(value) for key, value in one.items()} for one in held]
            for one, was in zip(held, before, strict=True):
                one.clear()
                one.update(was)
        if not all(map(_are_same, now, before)):
            raise NotCapturable(f"the forward pass writes to {text}, which a program would do once for all steps")
        return returned

    def _written_in_place(self, value: Any) -> Any:
        """The tensor that ``x += 1`` returns, if ``value`` is a placeholder of one; else ``value``."""
        marks = self._found.get("marks", ())
        index = next((index for index, mark in enumerate(marks) if mark is value), None)
        if index is None:
            return value
        graph, arguments = self._found["graph"], self._found["arguments"]
        node = _returned(graph)[index]
        while node.op == "call_function" and node.target in _IN_PLACE:
            node = node.args[0]
        places = [each for each in graph.graph.nodes if each.op == "placeholder"]
        return arguments[places.index(node)] if node in places else value

    def _place_outputs(self, returned: Any, marks: list[Tensor]) -> None:
        loss, outputs = returned
        index_of = {id(mark): index for index, mark in enumerate(marks)}
        if id(loss) not in index_of:
            raise NotCapturable("the loss is not computed from the batch")
        self.loss = index_of[id(loss)]
        self.outputs: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        for name, value in outputs.items():
            if not isinstance(value, Tensor):
                self.constants[name] = value
            elif id(value) in index_of:
                self.outputs[name] = index_of[id(value)]
            else:
                raise NotCapturable(f"the model's output {name!r} is a tensor that it did not compute")

    def _place_arguments(self, arguments: Sequence[Any], tensors: Sequence[Any], sources: list[str]) -> None:
        """Find the arguments that belong to the batch; compile the code that reads the others."""
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        self.places = [(place, index_of[id(value)]) for place, value in enumerate(arguments) if id(value) in index_of]
        of_batch = {place for place, _ in self.places}
        read = ["None" if place in of_batch else source for place, source in enumerate(sources)]
        try:
            self._read = compile(f"({''.join(f'{source}, ' for source in read)})", "<what a graph reads>", "eval")
            self._names = {"L": self._scope, "G": self._forward.__globals__}
            self._scope["tensors"] = tuple(tensors)
            self.known = [*eval(self._read, self._names)]
        except Exception as error:
            raise NotCapturable(f"the model reads a tensor that cannot be read again: {error}") from error
        if self.arguments(tensors) is None:
            raise NotCapturable("the model's tensors change at each read")
        for value in arguments:
            if not isinstance(value, Tensor):
                raise NotCapturable(f"the model computes with a {type(value).__name__} that changes between steps")


_numbers = itertools.count()


def _forward_of(loss_of: LossOf, rebuild: Callable[[Sequence[Tensor]], Any]) -> types.FunctionType:
    def forward(*tensors: Any) -> Any:
        return loss_of(rebuild(tensors))

    # Dynamo caches by code object and counts compilations, so each capture has its own code object.
    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return types.FunctionType(code, dict(globals()), code.co_name, None, forward.__closure__)


def _scope_of(forward: types.FunctionType) -> dict[str, Any]:
    cells = forward.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(forward.__code__.co_freevars, cells, strict=True)}


def _returned(graph: torch.fx.GraphModule) -> Sequence[Any]:
    output = next(node for node in graph.graph.nodes if node.op == "output")
    returned: Sequence[Any] = output.args[0]
    return returned


def _short(source: str) -> str:
    """A source as in Python code: ``model.layers.0`` for a module of a module."""
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", source.replace("L['loss_of'].", "").replace("__self__.", ""))


def _check_operations(graph: torch.fx.GraphModule) -> None:
    if any("activation_checkpoint" in str(node.target) for node in graph.graph.nodes):
        raise NotCapturable("activation checkpointing would be undone: a program computes everything once")
    targets = [node.target for node in graph.graph.nodes]
    if torch.Tensor.set_ in targets or any("shallow_copy_data_" in str(target) for target in targets):  # torch 2.14's
        raise NotCapturable("the forward pass replaces the data of a tensor (x.data = y); use x.copy_(y)")

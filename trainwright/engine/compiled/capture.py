"""From a model and a batch to the operations that make its loss, and whether they are still the same ones.

TorchDynamo reads the Python that leads from a batch to its loss, gives its tensor operations as one graph, and the
guards: what of the model, its settings and the process must be as it was for the graph to be right. The graph is then
called past that Python, so the guards are asked before each step.
"""

import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright._torch_compat.graph_capture import argument_sources, guard_check, run_captured, written_sources
from trainwright.engine.compiled.batch import Layout
from trainwright.engine.compiled.errors import NotCapturable, reason


class Effects:
    """What is at ``sources`` before a forward pass; ``undo`` afterwards tells what has become another."""

    def __init__(self, sources: list[str], scope: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        """Raises whatever comes of a source that leads nowhere."""
        within = {"L": scope, "G": _Names(names)}
        self._kept = [(source, found := eval(source, within), _contents(found)) for source in sources]
        if any(isinstance(found, type) for _, found, _ in self._kept):
            raise TypeError("what a class has cannot be put back as a whole")

    def undo(self, stand_for: Callable[[Any], Any]) -> list[str]:
        """Put everything back; gives the sources of what had changed. ``stand_for`` tells what a value is there for."""
        changed = [source for source, found, before in self._kept if _differ(_contents(found, stand_for), before)]
        for _, found, before in self._kept:
            _put_back(found, before)
        return changed


class _Names(dict[str, Any]):
    """Global names, with those that TorchDynamo makes for modules."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


def _contents(found: Any, stand_for: Callable[[Any], Any] = lambda value: value) -> Any:
    if isinstance(found, list):
        return [stand_for(value) for value in found]
    inside = found if isinstance(found, dict) else vars(found)
    return {key: stand_for(value) for key, value in inside.items()}


def _put_back(found: Any, before: Any) -> None:
    if isinstance(found, list):
        found[:] = before
        return
    inside = found if isinstance(found, dict) else vars(found)
    inside.clear()
    inside.update(before)


def _differ(now: Any, before: Any) -> bool:
    if isinstance(now, list):
        return len(now) != len(before) or any(map(_is_other, now, before))
    return now.keys() != before.keys() or any(_is_other(now[key], before[key]) for key in now)


def _is_other(left: Any, right: Any) -> bool:
    if left is right:
        return False
    is_plain = isinstance(left, bool | int | float | str) and type(left) is type(right)
    return not (is_plain and left == right) and not (isinstance(left, list | dict) and not left and left == right)


# (batch) -> loss, and whatever else is wanted of a step, by name: tensors, and what is the same in each
LossOf = Callable[[Any], tuple[Tensor, Mapping[str, Any]]]

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


class Capture:
    """The operations of one forward pass.

    Attributes:
        graph: takes ``arguments``, gives a tuple.
        loss: the place of the loss in that tuple.
        outputs: the places there of what else is wanted, by name; constants: those that are no tensors.
        places: which of the arguments are tensors of the batch, and which of them.
        known: the other arguments, in their places: parameters, buffers, whatever tensors the model holds.
    """

    def __init__(self, loss_of: LossOf, layout: Layout, tensors: Sequence[Any]) -> None:
        """Read how ``loss_of`` computes. Nothing is computed, and no random number drawn.

        Raises:
            NotCapturable: the Python in between does what a graph of operations cannot.
        """
        self._layout = layout
        self._forward = _forward_of(loss_of, layout.rebuild)
        self._scope = _scope_of(self._forward)
        self._found = found = dict[str, Any]()

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            found["graph"], found["sources"] = graph, argument_sources(graph)  # the latter are taken away later
            num_outputs = len(_returned(graph))
            marks = [torch.empty(0) for _ in range(num_outputs)]

            def call(*arguments: Any) -> list[Tensor]:
                found["arguments"], found["marks"] = arguments, marks
                return marks

            return call

        returned = self._run(backend, tensors)
        if "marks" not in found:
            raise NotCapturable("the loss is no function of tensors")
        self.graph: torch.fx.GraphModule = found["graph"]
        self._place_outputs(returned, found["marks"])
        self._place_arguments(found["arguments"], tensors, found["sources"])
        _check_operations(self.graph)
        found.clear()

    def arguments(self, tensors: Sequence[Any]) -> list[Any] | None:
        """What the graph takes for these tensors of a batch; None where the graph does not stand for this step."""
        scope = self._scope
        scope["tensors"] = tensors = tuple(tensors)
        if not self._holds(scope):
            return None
        arguments = [*eval(self._read, self._names)]
        if not all(
            map(operator.is_, arguments, self.known)
        ):  # a parameter that is another one: the optimizer's is not it
            return None
        for place, index in self.places:
            arguments[place] = tensors[index]
        return arguments

    def _run(self, backend: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        try:
            returned = run_captured(self._forward, backend, tensors)
        except Exception as error:  # of the compiler, or of what it ran into
            sources = written_sources(error)
            if sources is None:
                raise NotCapturable(reason(error)) from error
            returned = self._run_in_spite_of(sources, backend, tensors)
        self._holds = guard_check(self._forward)
        return returned

    def _run_in_spite_of(self, sources: list[str], backend: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Read the forward pass once more, and look whether what it writes to is as before."""
        told = ", ".join(_short(source) for source in sources)
        try:
            effects = Effects(sources, self._scope, self._forward.__globals__)
        except Exception as error:
            raise NotCapturable(f"the forward pass writes to {told}") from error
        try:
            returned = run_captured(self._forward, backend, tensors, may_write=True)
        except Exception as error:
            raise NotCapturable(reason(error)) from error
        finally:
            changed = effects.undo(self._written_in_place)
        if changed:
            raise NotCapturable(f"the forward pass writes to {told}, which a program would do once for all steps")
        return returned

    def _written_in_place(self, value: Any) -> Any:
        """The tensor that ``x += 1`` gives back as it was, where ``value`` is the mark of one; else ``value``."""
        graph, marks, arguments = (self._found.get(name, ()) for name in ("graph", "marks", "arguments"))
        index = next((index for index, mark in enumerate(marks) if mark is value), None)
        if index is None:
            return value
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
        """Which arguments are of the batch; of the others, the Python that reads them from where they are kept."""
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
            raise NotCapturable(f"the model reads a tensor from where it cannot be found again: {error}") from error
        if self.arguments(tensors) is None:
            raise NotCapturable("the model's tensors are others at each look")
        for value in arguments:
            if not isinstance(value, Tensor):
                raise NotCapturable(f"the model computes with a {type(value).__name__} that changes between steps")


_numbers = itertools.count()


def _forward_of(loss_of: LossOf, rebuild: Callable[[Sequence[Tensor]], Any]) -> types.FunctionType:
    def forward(*tensors: Any) -> Any:
        return loss_of(rebuild(tensors))

    # Dynamo keeps what it has compiled by the code object, and counts: each capture has one of its own.
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
    """A source as one would write it: ``model.layers.0`` for what holds the tensors of a module in a module."""
    return re.sub(r"\._modules\['(\w+)'\]", r".\1", source.replace("L['loss_of'].", "").replace("__self__.", ""))


def _check_operations(graph: torch.fx.GraphModule) -> None:
    if any("activation_checkpoint" in str(node.target) for node in graph.graph.nodes):
        raise NotCapturable("activation checkpointing would be undone: a program computes everything once")
    if any(node.target is torch.Tensor.set_ for node in graph.graph.nodes):
        raise NotCapturable(
            "the forward pass puts other data into a tensor (x.data = y); x.copy_(y) can be in a program"
        )

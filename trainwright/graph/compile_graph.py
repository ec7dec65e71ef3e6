"""The import of torch's compiler, and graphs compiled by inductor and other backends.

``torch.compile`` takes Python functions; a captured graph is passed to the backend directly. The fallback is to run the
graph itself, operation by operation.
"""

import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.base.errors import ConfigError, did_you_mean

# Inductor has its own random numbers; with fallback_random it draws torch's, so that eager and graph mode agree. The
# guards have already checked the shapes that size_asserts checks at each call.
INDUCTOR: dict[str, Any] = {"fallback_random": True, "size_asserts": False}

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]

_MOST_BYTES = 2**28  # of inputs: a larger program is not checked, because the check copies them
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # relative; other types round in the third digit


@functools.cache  # a failed import cannot be repeated
def refusal_of_compiler() -> str | None:
    """Why torch's compiler cannot be imported; None if it can. The import creates the compiler's cache folder."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    try:
        if folder and "torch._dynamo" not in sys.modules:
            Path(folder).mkdir(parents=True, exist_ok=True)
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch._inductor.config")
    except (ImportError, OSError) as error:
        return f"torch's compiler cannot be imported ({type(error).__name__}: {error})"
    return None


def check_backend(backend: str, where: str) -> None:
    """Raise for a name that is no backend. Without a compiler all steps are eager, so any name is accepted."""
    if backend in ("inductor", "eager", "aot_eager") or refusal_of_compiler() is not None:
        return
    known = [*torch.compiler.list_backends(exclude_tags=()), "eager", "aot_eager"]
    if backend not in known:
        raise ConfigError(f"{where}: got {backend!r}. {did_you_mean(backend, known)}")


def cpp_compilers() -> list[str]:
    """The names of the C++ compilers that inductor may use."""
    names: Any = ()
    with suppress(AttributeError):
        names = torch._inductor.config.cpp.cxx
    return [*filter(None, names if isinstance(names, tuple) else [names]), "g++", "clang++"]


def decompositions(backend: str) -> Any:
    """The decompositions of operations that ``backend`` needs; None if it needs none."""
    if backend != "inductor":
        return None
    select: Any = importlib.import_module("torch._inductor.decomposition").select_decomp_table
    with torch._inductor.config.patch(**INDUCTOR):
        return select()


def write_factors_out(graph: torch.fx.GraphModule) -> None:
    """Change ``add(x, y, alpha=factor)`` to ``add(x, y * factor)`` in a traced graph.

    Inductor (torch 2.11 to 2.14) makes one ``addmm`` of a matrix product x and the addition, and loses the factor: the
    weight decay of Adam and SGD would be 1.
    """
    add, multiply = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    for node in [*graph.graph.nodes]:
        if node.target is not add or node.kwargs.get("alpha", 1) == 1 or not isinstance(node.args[1], torch.fx.Node):
            continue
        with graph.graph.inserting_before(node):
            product = graph.graph.call_function(multiply, (node.args[1], node.kwargs["alpha"]))
        product.meta = {**node.args[1].meta}
        node.args, node.kwargs = (node.args[0], product), {}
    graph.recompile()


def compiled(graph: torch.fx.GraphModule, flat: Sequence[Tensor], backend: str) -> Compiled:
    """The compiled graph. Raises the errors of the compiler."""
    if backend in ("eager", "aot_eager"):
        return lambda inputs: graph(*inputs)
    call: Any
    if backend == "inductor":
        call = torch._inductor.compile(graph, [*flat], options=INDUCTOR)
    else:
        call = torch._dynamo.lookup_backend(backend)(graph, [*flat])
    check(lambda inputs: call(*inputs), graph, flat)
    return lambda inputs: call(*inputs)


def check(call: Compiled, graph: torch.fx.GraphModule, flat: Sequence[Tensor]) -> None:
    """Compare the outputs of ``call`` with those of the graph, run operation by operation on copies of the inputs.

    In-place updates are not compared: a step of Adam may depend on the sign of a rounding error. Graphs with random
    numbers are not checked.
    """
    if sum(tensor.nbytes for tensor in flat) > _MOST_BYTES or any(map(_is_random, graph.graph.nodes)):
        return
    expected = graph(*[tensor.detach().clone() for tensor in flat])
    found = call([tensor.detach().clone() for tensor in flat])
    for output, value in zip(found, expected, strict=True):
        is_same_kind = output.shape == value.shape and output.dtype == value.dtype
        if not is_same_kind or not _are_close(output, value):
            raise ArithmeticError("the compiled program and its operations give different values")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of compilers, which concern only themselves."""
    compiler = logging.getLogger("torch._inductor")
    level = compiler.level
    compiler.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        compiler.setLevel(level)


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _are_close(output: Tensor, value: Tensor) -> bool:
    if not value.is_floating_point():
        return bool(torch.equal(output, value))
    tolerance = _TOLERANCE.get(value.dtype, 0.05)
    return bool(torch.allclose(output, value, rtol=tolerance, atol=tolerance, equal_nan=True))

"""What the text of a user's function shows: for warnings, never for what a run does."""

import ast
import inspect
from collections.abc import Callable, Collection
from textwrap import dedent
from typing import Any


def lacks_return(function: Callable[..., Any]) -> bool:
    """Whether the text of a function computes something and ends without a ``return``.

    False where the text does not decide it: it is not known, a decorator may return something else, or the function
    yields or ends with an exception.
    """
    definition = _definition_of(function)
    if definition is None or isinstance(definition.body[-1], ast.Raise):
        return False
    nodes = [node for line in definition.body for node in ast.walk(line)]
    computes, gives = (
        any(isinstance(node, kinds) for node in nodes)
        for kinds in ((ast.Call, ast.Dict), (ast.Return, ast.Yield, ast.YieldFrom))
    )
    return computes and not gives and not hasattr(function, "__wrapped__")


def leaves_unread(function: Callable[..., Any], attribute: str, others: Collection[str]) -> bool:
    """Whether the text of a function uses its first argument only for ``others``, and ``attribute`` of nothing."""
    definition = _definition_of(function)
    arguments = [] if definition is None else definition.args.args[inspect.ismethod(function) :]
    if definition is None or not arguments:
        return False
    nodes = [*ast.walk(definition)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    is_read = any(one.attr == attribute and ast.unparse(one.value) != "torch" for one in attributes)
    is_read |= any(attribute in text for text in texts)
    inside = {id(one.value) for one in attributes if one.attr in others}
    used = (node for node in nodes if isinstance(node, ast.Name) and node.id == arguments[0].arg)
    return not is_read and all(id(node) in inside for node in used)


def divides_by(function: Callable[..., Any], attribute: str) -> bool:
    """Whether the text of a function divides by an attribute of this name."""
    definition = _definition_of(function)
    nodes = [] if definition is None else [*ast.walk(definition)]
    divided = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    divided += [node.value for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)]
    return any(isinstance(one, ast.Attribute) and one.attr == attribute for one in divided)


def _definition_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The text of a function, parsed; None if it is not known."""
    try:
        (definition,) = ast.parse(dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) else None

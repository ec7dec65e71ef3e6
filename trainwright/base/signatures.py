"""The signatures of functions and classes, whatever their annotations, and their return statements."""

import ast
import inspect
import logging
import sys
from collections.abc import Callable, Collection
from textwrap import dedent
from typing import Any

logger = logging.getLogger("trainwright.engine")


def read_signature(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """``inspect.signature``, also where annotations have names that only type checkers import.

    Python 3.14 evaluates annotations when they are read, and such a name is then an error.

    Raises:
        TypeError: it is not callable.
        ValueError: it is written in C, and has no signature.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.FORWARDREF)
    return inspect.signature(function, follow_wrapped=follow_wrapped)


def shown_arguments(function: Callable[..., Any], *, is_bound: bool = True) -> str:
    """The arguments of a function as messages show them: without annotations, and without ``self`` if it has that.

    Those of a decorator, if it may add some.

    >>> shown_arguments(lambda data, size=1: data)
    '(data, size=1)'
    """
    signature = read_signature(function, follow_wrapped=False)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters[not is_bound :], return_annotation=signature.empty))


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


def warn_of_no_results(function: Callable[..., Any], name: str) -> None:
    """Log a method for the results of an evaluation that has no ``return``."""
    if lacks_return(function):
        logger.warning(
            "%s has no return statement, so there are no results: return {'accuracy': value}. If there are none on"
            " purpose, return {}.", name,
        )  # fmt: skip

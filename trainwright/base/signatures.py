"""The signatures of functions and classes, whatever their annotations."""

import inspect
import sys
from collections.abc import Callable
from typing import Any


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

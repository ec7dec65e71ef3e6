"""Reasons why a step cannot be a program."""

import linecache
import re
import traceback
from pathlib import Path


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

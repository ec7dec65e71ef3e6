"""Why a step cannot be one program."""

import linecache
import re
import traceback
from pathlib import Path


class NotCapturable(Exception):  # noqa: N818  # no error of the user's: the run goes on eagerly
    """The step stays eager. The text says which operation and why, and ends without a full stop."""


class NotReady(Exception):  # noqa: N818
    """The optimizer has not made its state yet: the next step is to be eager."""


def reason(error: BaseException) -> str:
    """What a compiler says in pages, in a line: what it met, and where in the user's own code."""
    if isinstance(error, NotCapturable):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[0] if lines else type(error).__name__
    for line in lines[1:]:
        if line.startswith("Explanation:"):
            told = f"{told}: {line.removeprefix('Explanation:').strip()}"
            break
    frames = [
        frame for frame in getattr(error, "real_stack", None) or () if "/trainwright/engine/" not in frame.filename
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if not where and isinstance(error, _MISHAPS):
        return f"the forward pass {_mishap(error, told)}"
    return f"{told.rstrip('.')}{where}"[:400]


def trace_reason(error: BaseException) -> str:
    """Why the operations of an update could not be written down: which of them, and where torch gave up."""
    return f"{_operation(error)} {_mishap(error, reason(error) if not isinstance(error, _MISHAPS) else str(error))}"


# What is no refusal but a mistake, of torch's perhaps: of itself its text tells nothing.
_MISHAPS = (AssertionError, AttributeError, LookupError, NameError, TypeError)


def _mishap(error: BaseException, told: str) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"could not be traced ({where}{(told or type(error).__name__).rstrip('.')})"[:400]


def _operation(error: BaseException) -> str:
    """The operation of the forward pass that an error came up in, or the part of the update that comes after it."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if frame.filename.startswith("<eval_with_key>"):  # the code of the graph that TorchDynamo has made
            called = re.search(r"=\s*([\w.]+)\(", linecache.getline(frame.filename, frame.lineno or 0))
            return called[1].rpartition(".")[2] if called else "an operation of the forward pass"
    if any(Path(frame.filename).match("torch/autograd/__init__.py") for frame in frames):
        return "the backward pass"
    return "the update"

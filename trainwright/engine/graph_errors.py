"""Why a step cannot be one program."""


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
    return f"{told.rstrip('.')}{where}"[:400]

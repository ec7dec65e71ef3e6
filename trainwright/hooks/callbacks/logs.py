"""The values that callbacks see: a mapping whose tensors are synchronized only when they are read."""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from trainwright._torch_compat.tensor_chunks import is_dtensor
from trainwright.base.errors import ConfigKeyError, nearest_name


class Logs(MutableMapping[str, Any]):
    """A mapping like a dict, whose tensors read as floats.

    A tensor of one element stays on its device; reading it synchronizes, ``name in logs`` and ``len`` do not.
    The values are always the latest ones: copy them with ``dict(logs)`` to keep them.

    >>> import torch
    >>> logs = Logs(global_step=1)
    >>> logs["step_loss"] = torch.tensor(0.5)
    >>> logs["step_loss"]
    0.5
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self._values: dict[str, Any] = {}
        self._readers: dict[str, Callable[[], Any]] = {}
        self.update(values or {}, **more)

    def __getitem__(self, name: str) -> Any:
        value = self._values[name] if name in self._values else self.unread(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = self._values[name] = value.item()
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.detach().clone()  # the step may write to its tensor later
            value = value.full_tensor() if is_dtensor(value) else value  # every process sets it, and one may read it
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._values.pop(name, None)
        self._readers.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._values or name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter({**self._values, **self._readers})

    def __len__(self) -> int:
        return len(self._values.keys() | self._readers.keys())

    def __repr__(self) -> str:
        return f"Logs({dict(self)})"

    def copy(self) -> dict[str, Any]:
        """The current values, as a plain dict of numbers."""
        return dict(self)

    def numbers(self) -> dict[str, int | float]:
        """The numbers that were set; deferred values are excluded."""
        return {name: value for name in self._values if isinstance(value := self[name], int | float)}

    def count(self, *names: str, by: int = 1) -> None:
        """Add to counters, which start at 0."""
        values = self._values
        for name in names:
            values[name] = values.get(name, 0) + by

    def defer(self, name: str, read: Callable[[], Any]) -> None:
        """Read ``name`` by calling ``read`` each time; a value that is set takes precedence."""
        self._readers[name] = read

    def unread(self, name: str) -> Any:
        """The value without synchronization; it may be a tensor.

        Raises:
            KeyError: there is no such value.
        """
        if name in self._values:
            return self._values[name]
        if name not in self._readers:
            if name == "loss":
                near = " The mean of the epoch is 'epoch_loss', that of the last batch 'step_loss'."
            elif name.startswith("val_") and not any(one.startswith("eval_") for one in self.numbers()):
                near = " Results of an evaluation, such as 'eval_loss', are there after it."
            else:
                near = nearest_name(re.sub(r"^(val|valid|validation|test)_", "eval_", name), self)
            raise ConfigKeyError(f"logs has no {name!r}.{near} There are: {', '.join(sorted(self)) or 'none yet'}.")
        return self._readers[name]()

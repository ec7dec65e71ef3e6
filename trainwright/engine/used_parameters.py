"""The parameters that an update has used: all data ranks must have used the same ones.

Where the gradients of a model are averaged in groups, as FSDP2 does, a rank sends those that it has. If another rank
has gradients of other parameters of the same sizes, torch adds up different ones without an error.
"""

from collections.abc import Iterable
from zlib import crc32

from torch import nn

from trainwright.checkpoint.weights import group_names
from trainwright.config.errors import ConfigError
from trainwright.events.storage import get_event_storage, has_event_storage
from trainwright.parallel.dist import gather_over_data


class UsedParameters:
    """Compares the parameters that the data ranks have used, after the backward passes of an update.

    The first update compares at once. Later, a rank records each change of its own, and the records are compared with
    the next log line (``EventStorage.alike``): no update waits for an exchange.

    Args:
        parts: the modules of this process whose gradients are averaged in groups.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        named = [pair for part in parts for pair in part.named_parameters()]
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._key = f"used parameters from {next(iter(self._names), None)}"
        self._used: list[bool] | None = None  # by the latest update
        self._num_checks = self._record = 0

    def check(self) -> None:
        """Call this when gradients are there, before they are set to None.

        Raises:
            ConfigError: in the first update the data ranks have used different parameters. Raised on all of them.
        """
        if self._parameters and has_event_storage():  # each training has one
            get_event_storage().alike.setdefault(self._key, self._alike)
        used = [parameter.grad is not None for parameter in self._parameters]
        self._num_checks += 1
        if used == self._used or not any(used):
            return
        if self._used is None:
            self._compare(used)
        else:
            self._record = crc32(repr((self._record, self._num_checks, used)).encode())
        self._used = used

    def _compare(self, used: list[bool]) -> None:
        ranks = gather_over_data(used)
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                differ = [name for name, *pair in zip(self._names, ranks[0], other, strict=True) if pair[0] != pair[1]]
                raise ConfigError(
                    f"Data ranks 0 and {rank} have used different parameters in an update, whose gradients would be"
                    f" averaged with those of others: {', '.join(group_names(differ))}. Set find_unused_parameters=True"
                    " (train.dist.find_unused_parameters in config files) if this is intended; otherwise let each loss"
                    " depend on all parameters, or freeze them with requires_grad_(False)."
                )

    def _alike(self) -> dict[str, float]:
        # Other stages have other parameters, so another name. Of so few numbers, any two are compared as different.
        name = f"the parameters that updates have used, from {self._names[0]} on (find_unused_parameters=True allows"
        return {f"{name} different ones), as a checksum": float(self._record % 10_000)}

"""Tied parameters of a pipeline: one weight that several stages hold, such as an embedding that is also the head."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._torch_compat.probing import real_tensors
from trainwright._torch_compat.tensor_chunks import local_of
from trainwright.base.dist import TIED_COPY, all_gather_object
from trainwright.base.errors import ConfigError
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.pipeline_cut import Tie

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_SETTINGS = ("params", "param_names", "name")  # of an optimizer's group


class TiedParameters:
    """Keeps the copies of each tied parameter equal: their gradients are added up before each update.

    Args:
        model: the model in this process, with the parameters of its stages.
        own: the stages of this process.
        rank_of: the pipeline rank of each stage.
    """

    def __init__(
        self, model: nn.Module, ties: Sequence[Tie], own: Sequence[int], rank_of: Sequence[int], mesh: Mesh
    ) -> None:
        """Every process must call this."""
        self._model, self._own, self._rank_of, self._mesh = model, frozenset(own), rank_of, mesh
        self._ties = [(tie, self._group_of(tie)) for tie in ties]
        self._copies: list[list[nn.Parameter]] | None = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add up the gradients of each parameter over the stages that hold it; each gets the sum."""
        dist: Any = torch.distributed
        for _, group, copies in self._each():
            if not copies or not copies[0].requires_grad:
                continue
            for copied in copies:
                if copied.grad is None:
                    copied.grad = torch.zeros_like(copied)
            parts = [local_of(copied.grad) for copied in copies if copied.grad is not None]
            for part in parts[1:]:
                parts[0] += part
            if group is not None:
                dist.all_reduce(parts[0], group=group)
            for part in parts[1:]:
                part.copy_(parts[0])

    def find_copies(self) -> None:
        """Find the copies again: sharding replaces parameters. Marks those that another stage counts in the norm."""
        self._copies = []
        for tie, _ in self._ties:
            first, *_ = sorted(tie.names)
            copies = {
                stage: self._model.get_parameter(tie.names[stage][0]) for stage in tie.names if stage in self._own
            }
            for stage, copied in copies.items():
                if stage != first:
                    setattr(copied, TIED_COPY, tie.names[first][0])
            self._copies.append([*copies.values()])

    def check_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that an optimizer updates all copies of a parameter alike. Every process must call this.

        Raises:
            ConfigError: its groups have different settings for them.
        """
        settings = {
            id(parameter): {key: value for key, value in group.items() if key not in _NO_SETTINGS}
            for group in groups
            for parameter in group["params"]
        }
        for tie, group, copies in self._each():
            if not copies:
                continue
            own: list[Any] = [settings.get(id(copied)) for copied in copies]
            found = [own] if group is None else all_gather_object(own, group)
            first, *others = [one for values in found for one in values]
            for other in others:
                if other != first:
                    different = [key for key in first or {} if other is None or first[key] != other.get(key)]
                    raise ConfigError(
                        f"{_named(tie)} are one weight on several pipeline stages; the optimizer must update its copies"
                        f" alike, but their groups differ in {', '.join(different) or 'whether they train it'}."
                    )

    def _each(self) -> list[tuple[Tie, "ProcessGroup | None", list[nn.Parameter]]]:
        if self._copies is None:
            self.find_copies()
        assert self._copies is not None, "found above"
        return [(tie, group, copies) for (tie, group), copies in zip(self._ties, self._copies, strict=True)]

    def _group_of(self, tie: Tie) -> "ProcessGroup | None":
        """The processes that hold the parameter; None: it is only one. Every process must call this."""
        dist: Any = torch.distributed
        ranks = sorted({self._rank_of[stage] for stage in tie.names})
        if len(ranks) == 1:
            return None
        if len(ranks) == self._mesh.layout.pipeline:
            return self._mesh.pipeline_group
        with real_tensors():  # in an estimate, too
            places = self._mesh.device_mesh.mesh[ranks].flatten(1).T.tolist()  # one row for each data and tensor rank
        groups = [dist.new_group(row) for row in places]
        mine = dist.get_rank()
        return next((group for row, group in zip(places, groups, strict=True) if mine in row), None)


def _named(tie: Tie) -> str:
    return " and ".join(names[0] for names in tie.names.values())

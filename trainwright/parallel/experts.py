"""Expert parallel: each process holds some experts of every layer, and computes them for the tokens of all processes.

Each process has tokens of its own. A token travels once for each expert that its router chooses, to the process that
holds the expert, and the result travels back: two all-to-all exchanges of as many rows as there are. None is dropped.
Tensor-parallel processes have the same tokens: each sends its share of them, and all get all results.

T tokens of this process, K experts for each, N rows that it computes, D features.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.base.errors import ConfigError
from trainwright.parallel.recompute import replace_forward
from trainwright.parallel.simulated import simulation
from trainwright.parallel.tensor import distribute_parameters, refuse_second_order, replace_during_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TOTAL = "num_experts_of_all"  # the attribute of divided experts with their number


def shard_experts(
    model: nn.Module, mesh: "DeviceMesh", names: Iterable[str], same_tokens: "DeviceMesh | None" = None
) -> None:
    """Keep this process's experts of the modules ``names``, in place; the values of their parameters are those before.

    The gradients that a process computes for its experts come from the losses of all processes of ``mesh``, and are
    divided by the number of these losses: as if each had averaged its own.

    Args:
        mesh: the dimension of the processes that divide the experts.
        same_tokens: that of the tensor-parallel processes, which have the same tokens and one loss; None: each process
            has tokens of its own.
    """
    size, num_losses = mesh.size(), mesh.size() // (1 if same_tokens is None else same_tokens.size())
    for name in names:
        module: Any = model.get_submodule(name)
        total = module.num_experts
        setattr(module, _TOTAL, total)
        module.num_experts = total // size
        replace_forward(module, partial(_exchanging, name, mesh, same_tokens))
        parameters = distribute_parameters(module, mesh, lambda _: Shard(0))
        replace_during_forward(module, parameters, partial(_own_experts, num_losses))
        refuse_second_order(module, "expert")


@contextmanager
def complete_experts(model: nn.Module) -> Iterator[None]:
    """Each process has all experts of ``model``, and computes those of its tokens by itself.

    Every process must enter and leave. The parameters of the units of ZeRO must be gathered.
    """
    divided: list[Any] = [module for module in model.modules() if hasattr(module, _TOTAL)]
    own = [module.num_experts for module in divided]
    complete = [
        {name: parameter.full_tensor() for name, parameter in module.named_parameters(recurse=False)}
        for module in divided
    ]
    for module, tensors in zip(divided, complete, strict=True):
        vars(module).update(tensors, num_experts=getattr(module, _TOTAL))
    try:
        yield
    finally:
        for module, tensors, number in zip(divided, complete, own, strict=True):
            for name in tensors:
                vars(module).pop(name, None)
            module.num_experts = number


def _own_experts(num_losses: int, *parameters: DTensor) -> tuple[Tensor, ...]:
    values = tuple(parameter.to_local() for parameter in parameters)
    for value in values:
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient / num_losses)  # type: ignore[no-untyped-call]
    return values


def _exchanging(
    name: str, mesh: "DeviceMesh", same_tokens: "DeviceMesh | None", forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A ``forward`` of all experts, of which this process computes its own, for the tokens of all processes."""

    @wraps(forward)
    def compute(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = getattr(module, _TOTAL)
        if module.num_experts == total:  # see `complete_experts`
            hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
            return forward(module, hidden, top_k_index, top_k_weights)
        hidden_TD, num_choices = hidden.reshape(-1, hidden.shape[-1]), top_k_index.shape[-1]
        if top_k_index.shape != top_k_weights.shape or top_k_index.numel() != len(hidden_TD) * num_choices:
            shapes = ", ".join(str(tuple(one.shape)) for one in (hidden, top_k_index, top_k_weights))
            raise ConfigError(
                f"expert_parallel_size: {name} ({type(module).__name__}) was called with tensors of the shapes"
                f" {shapes}; it needs features (tokens, features), experts (tokens, choices) and their weights (tokens,"
                " choices)."
            )
        num_tokens, shape = len(hidden_TD), hidden.shape
        if same_tokens is not None:
            rows_of_all = hidden_TD, top_k_index.reshape(-1, num_choices), top_k_weights.reshape(-1, num_choices)
            hidden_TD, top_k_index, top_k_weights = (_share(rows, same_tokens) for rows in rows_of_all)
        experts = top_k_index.reshape(-1)  # T x K
        sent, received, expert_N = _rows(name, experts, total, mesh)
        order = experts.argsort(stable=True)
        rows_ND = _moved(hidden_TD[order // num_choices], received, sent, mesh)
        weights_N = _moved(top_k_weights.reshape(-1)[order], received, sent, mesh)
        # A process without rows computes a padding row: parameters without a gradient could not be averaged with those
        # of other processes, and these wait for its backward pass.
        padding = int(not len(rows_ND))
        rows_ND = forward(
            module,
            F.pad(rows_ND, (0, 0, 0, padding)),
            F.pad(expert_N, (0, padding))[:, None],
            F.pad(weights_N, (0, padding))[:, None],
        )[: len(rows_ND)]
        rows = _moved(rows_ND, sent, received, mesh)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        result = torch.unflatten(rows[place], 0, (-1, num_choices)).sum(1)
        if same_tokens is not None:
            result = _whole(result, num_tokens, same_tokens)
        # Not a view: a model may change it in place, which would remove torch's hook for ZeRO from a view.
        return result if len(shape) == 2 else result.reshape(shape).clone()

    return compute


def _share(rows: Tensor, mesh: "DeviceMesh") -> Tensor:
    """This process's share of the rows that all of ``mesh`` have; their gradients become those of all rows."""
    whole = rows if isinstance(rows, DTensor) else DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    share: Tensor = whole.redistribute(placements=[Shard(0)]).to_local()
    return share


def _whole(rows: Tensor, number: int, mesh: "DeviceMesh") -> Tensor:
    """The ``number`` of rows of which each process of ``mesh`` has its share."""
    shape = torch.Size([number, *rows.shape[1:]])
    shares = DTensor.from_local(
        rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(rows.shape[-1], 1)
    )
    whole: Tensor = shares.redistribute(placements=[Replicate()]).to_local()
    return whole.clone()


def _rows(name: str, experts: Tensor, total: int, mesh: "DeviceMesh") -> tuple[list[int], list[int], Tensor]:
    """The numbers of rows for each process and of each process, and which of its experts each of the latter is for."""
    size, device = mesh.size(), experts.device
    own = torch.arange(total // size, device=device)
    if simulation() is not None:  # there are no values: all experts have equally many rows
        rows = [len(experts) // size + (rank < len(experts) % size) for rank in range(size)]
        return rows, rows, own.repeat(-(-len(experts) // len(own)))[: len(experts)]
    counts = torch.bincount(experts, minlength=total)
    if len(counts) > total:
        raise ConfigError(f"expert_parallel_size: {name} was called for expert {len(counts) - 1}; it has {total}.")
    received = collectives.all_to_all_single(counts, None, None, mesh.get_group())
    sums: list[list[int]] = torch.stack([counts, received]).view(2, size, -1).sum(2).tolist()
    return sums[0], sums[1], own.repeat(size).repeat_interleave(received)


def _moved(rows: Tensor, received: Sequence[int], sent: Sequence[int], mesh: "DeviceMesh") -> Tensor:
    """The rows that the processes have sent to this one; their gradients travel back."""
    moved: Tensor = collectives.all_to_all_single_autograd(rows.contiguous(), [*received], [*sent], mesh.get_group())
    return moved

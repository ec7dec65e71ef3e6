"""A small model on several processes, spread by hand in any layout, for tests of checkpoints."""

import math
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint import Checkpointer

WIDTH = 10  # does not divide by 3 or 4: uneven shards
VOCABULARY = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Any) -> Any:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Net(nn.Module):
    """``is_tied``: the embedding is the head's weight, too."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if is_tied:
            self.head.weight = self.embedding.weight


Content = dict[str, torch.Tensor]
# The sizes of the dimensions pp, replicate, shard, tp; each process of the first two has all of it.
LAYOUTS: dict[str, tuple[int, ...]] = {
    "one process": (1,),
    "ddp 2": (2,),
    "zero 2": (1, 1, 2, 1),
    "tp 2": (1, 1, 1, 2),
    "pp 2": (2, 1, 1, 1),
    "zero 3": (1, 1, 3, 1),
    "zero 2, tp 2": (1, 1, 2, 2),
    "copies 2, zero 2": (1, 2, 2, 1),
    "pp 2, tp 2": (2, 1, 1, 2),
    "copies 2, tp 2": (1, 2, 1, 2),
    "pp 2, zero 2, tp 2": (2, 1, 2, 2),
}


def world_size(layout: str) -> int:
    return math.prod(LAYOUTS[layout])


def spread(layout: str, is_tied: bool = False) -> tuple[nn.Module, Any]:
    """A model on all processes, and their mesh."""
    torch.manual_seed(0)
    model, sizes = Net(is_tied), LAYOUTS[layout]
    if len(sizes) == 1:
        return model, None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stages, copies, shards, parts = sizes
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    if stages > 1:
        stage = mesh.get_local_rank("pp")
        del model.blocks[str(1 - stage)]
        if stage:
            del model.embedding
        else:
            del model.head
    if parts > 1:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        plan |= {"embedding": RowwiseParallel()} if hasattr(model, "embedding") else {}
        plan |= {"head": ColwiseParallel()} if hasattr(model, "head") else {}
        parallelize_module(model, mesh["tp"], plan)
        replicate_rest(model, mesh["tp"])
        if is_tied and stages == 1:
            model.head.weight = model.embedding.weight
    if copies * shards > 1:
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
    return model, mesh


def replicate_rest(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                replica = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                setattr(module, name, nn.Parameter(replica))


def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Each layer has a rate of its own: the stages of a pipeline have other groups."""
    found: list[dict[str, Any]] = []
    for part, factor in {"embedding": 1, "blocks.0": 2, "blocks.1": 3, "head": 1}.items():
        named = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith(part)]
        plain = [parameter for name, parameter in named if "norm" in name or "bias" in name]
        others = [parameter for name, parameter in named if not ("norm" in name or "bias" in name)]
        for parameters, decay in ((others, 0.1), (plain, 0.0)):
            if parameters:
                found.append({"params": parameters, "weight_decay": decay, "lr": lr * factor})
    return found


def trained(layout: str, amount: float, is_tied: bool = False) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer after two steps, and its mesh. The gradients depend on the values and ``amount``."""
    model, mesh = spread(layout, is_tied)
    optimizer = torch.optim.AdamW(groups(model, 0.01 + amount))
    step(model, optimizer, amount)
    step(model, optimizer, amount)
    return model, optimizer, mesh


def step(model: nn.Module, optimizer: Any, amount: float) -> None:
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() * 0.5 + amount).clone()
    optimizer.step()
    optimizer.zero_grad()
    model.seen += 1


def checkpointer_of(layout: str, folder: Any, amount: float, **said: Any) -> tuple[Checkpointer, Any, Any]:
    model, optimizer, mesh = trained(layout, amount, said.pop("is_tied", False))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3 if amount else 5)
    said |= {"optimizer": optimizer, "lr_scheduler": schedule}
    return Checkpointer(model, folder, mesh=mesh, **said), model, optimizer


def full(value: Any) -> Any:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def content(model: nn.Module, optimizer: Any) -> Content:
    """All values of a model and its optimizer, by name. Every process must call it."""
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    found = {f"model.{name}": full(value) for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            found |= {f"optimizer.{name}.{key}": full(value) for key, value in optimizer.state[parameter].items()}
            found[f"optimizer.{name}.settings"] = torch.tensor([group["lr"], group["weight_decay"]])
    return found


def save(layout: str, folder: str, is_tied: bool = False, **said: Any) -> tuple[Content, Content]:
    """Save "one"; returns what it holds, and the values one step later."""
    checkpointer, model, optimizer = checkpointer_of(layout, folder, 0.25, is_tied=is_tied, **said)
    before = content(model, optimizer)
    checkpointer.save("one", iteration=7, accuracy=0.5)
    step(model, optimizer, 0.25)
    checkpointer.wait()
    return before, content(model, optimizer)


def load(layout: str, folder: str, is_tied: bool = False, values: Any = None) -> tuple[Content, Content]:
    """Resume, where ``values`` are those of the save; returns the content, and that of one step later."""
    checkpointer, model, optimizer = checkpointer_of(layout, folder, 0.0, is_tied=is_tied)
    assert checkpointer.resume_or_load("") == (values or {"iteration": 7, "accuracy": 0.5})
    schedule: Any = checkpointer.checkpointables["lr_scheduler"]
    assert schedule.step_size == 3
    assert schedule.base_lrs == [group["initial_lr"] for group in optimizer.param_groups]
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    before = content(model, optimizer)
    step(model, optimizer, 0.25)
    return before, content(model, optimizer)


def save_all(cases: list[tuple[str, str, bool]]) -> list[Any]:
    return [save(*case) for case in cases]


def load_all(cases: list[tuple[str, str, bool]]) -> list[Any]:
    return [load(*case) for case in cases]

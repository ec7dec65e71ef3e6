"""Gradient checkpointing "selective" repeats no all-reduce, reduce-scatter or all-to-all of an update."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.layout_runs import Texts, settings
from tests.parallel.test_tensor import of_transformers
from tests.ranks import on_ranks
from trainwright import Trainer

KINDS = ("all_reduce", "reduce_scatter", "all_to_all")


class Block(nn.Module):
    """Two parts, as attention and feed-forward: the all-reduce of the first is within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


class Blocks(nn.Module):
    tensor_plan: ClassVar[dict[str, str]] = {
        "begin": "sequence_begin",
        "blocks.*.norm.*": "norm",
        "norm": "norm",
        "blocks.*.up.*": "colwise",
        "blocks.*.down.*": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.norm = nn.Embedding(33, 16), nn.LayerNorm(16)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 33)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.begin(input_ids)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


class Rows(Texts):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Count(TorchDispatchMode):
    """Counts collective calls by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace.startswith(("_c10d", "c10d")):
            for kind in KINDS:
                self.found[kind] += kind in function.__name__
        return function(*args, **(kwargs or {}))


class Counted(Trainer):
    """Counts those of the second update."""

    updates, count = 0, Count()

    def train_step(self, model: Any, inputs: Any) -> Any:
        self.updates += 1
        if self.updates != 2:
            return super().train_step(model, inputs)
        with Count() as self.count:
            return super().train_step(model, inputs)


CASES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "zero": {"zero_stage": 3},
    "context": {"context_parallel_size": 2},
    "experts": {"expert_parallel_size": 2},
}


def counted(folder: Path) -> dict[str, dict[Any, Any]]:
    found: dict[str, dict[Any, Any]] = {}
    for case, layout in CASES.items():
        found[case] = {}
        for kind in (False, "selective", True):
            kinds = {"context": "Llama", "zero": "Llama", "experts": "Mixtral"}
            model = of_transformers(kinds[case], attn_implementation="sdpa") if case in kinds else Blocks()
            usual = {"batch_size": 4, "metrics": None, "save_enabled": False, "gradient_checkpointing": kind}
            config = settings(folder / f"{case}{kind}", **usual, **layout)
            trainer = Counted(model, config, train_dataset=Rows(24))
            loss = trainer.train()
            found[case][kind] = trainer.count.found, loss
    return found


def test_a_selective_recomputation_repeats_no_exchange(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found in on_ranks(counted, tmp_path, timeout=150):
        for case, by_kind in found.items():
            plain, losses = by_kind[False]
            assert by_kind["selective"][0] == plain, (case, by_kind)
            assert by_kind["selective"][1] == losses == by_kind[True][1], case
        assert found["tensor"][True][0]["all_reduce"] > found["tensor"][False][0]["all_reduce"]
        assert found["sequence"][True][0]["reduce_scatter"] > found["sequence"][False][0]["reduce_scatter"]
        for case in ("context", "experts"):
            assert found[case][True][0]["all_to_all"] > found[case][False][0]["all_to_all"] > 0

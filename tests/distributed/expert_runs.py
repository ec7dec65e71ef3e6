"""Trains models with experts through either API, under any layout; each process has tokens of its own."""

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.layout_runs import GLOBAL_BATCH, VOCABULARY, Record, Texts, UnsavedTrainer, file_config, settings
from tests.parallel.test_tensor import of_transformers
from trainwright import Trainer
from trainwright.config import LazyCall

CHOICES, WIDTH = 2, 16
BALANCE = 0.1  # the factor of the load-balancing loss
RATE, MAX_NORM = 0.1, 0.5


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(number, WIDTH, 2 * WIDTH) / 4)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                result = F.linear(F.gelu(F.linear(hidden[token], self.up[expert])), self.down[expert])
                out = out.index_add(0, token, (result * top_k_weights[token, choice, None]).to(out.dtype))
        return out


class Block(nn.Module):
    """``bias``: added to the scores of the first experts, as many as a token chooses."""

    def __init__(self, number: int, bias: float) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, number), Experts(number)
        with torch.no_grad():
            self.router.bias[:CHOICES] += bias

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(hidden).flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        weights, index = scores.topk(CHOICES)
        hidden = hidden + self.experts(flat, index, weights).view_as(hidden)
        chosen = F.one_hot(index, scores.shape[-1]).sum(1).to(scores.dtype).mean(0)
        return hidden, (chosen * scores.mean(0)).sum() * scores.shape[-1]


class Mixture(nn.Module):
    """A language model of one token each. ``balance``: the factor of the load-balancing loss of a call's tokens."""

    tensor_plan: ClassVar[dict[str, str]] = {"blocks.*.experts": "experts"}

    def __init__(self, experts: int = 4, bias: float = 0.0, balance: float = BALANCE) -> None:
        super().__init__()
        self.balance = balance
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, bias) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden, balance = self.embedding(input_ids), torch.zeros((), dtype=self.embedding.weight.dtype)
        for block in self.blocks:
            hidden, more = block(hidden)
            balance = balance + more
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + self.balance * balance, "logits": logits}


_SIZES = {"num_experts_per_tok": CHOICES, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": BALANCE},
    "Qwen2Moe": {**_SIZES, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**_SIZES, "num_experts": 8, "norm_topk_prob": True, "output_router_logits": True},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": CHOICES, "eos_token_id": 1},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": CHOICES, "sliding_window": 8, "pad_token_id": 0},
    "DeepseekV3": {
        **_SIZES, **_LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "num_key_value_heads": 4, "head_dim": 4,
    },
}  # fmt: skip


def build(kind: str, *, is_double: bool = False, **changes: Any) -> nn.Module:
    model = Mixture(**changes) if kind == "Mixture" else of_transformers(kind, **OF_TRANSFORMERS[kind] | changes)
    return model.double() if is_double else model


class Rows(Texts):
    """Fields as models of transformers name them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def micro_batch(settings: dict[str, Any]) -> int:
    ranks = settings.get("context_parallel_size", 1) * settings.get("tensor_parallel_size", 1)
    return GLOBAL_BATCH // (world_size() // ranks) // settings.get("gradient_accumulation_steps", 1)


def trainer_of(folder: Path, model: Any, updates: int, *, kind: type[Trainer] = Trainer, **own: Any) -> Trainer:
    usual = {
        "optimizer": "SGD", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": MAX_NORM,
        "dataloader_shuffle": False, "save_enabled": False, "eval_batch_size": 4, "evaluate_with_generate": False,
        "log_steps": 1000, "batch_size": micro_batch(own), "metrics": None,
    }  # fmt: skip
    return kind(model, settings(folder, **usual | own), train_dataset=Rows(GLOBAL_BATCH * updates))


def objects(folder: Path, model: dict[str, Any], updates: int = 3, **own: Any) -> dict[str, Any]:
    """The values of a run of the Python API."""
    trainer, record = trainer_of(folder, build(**model), updates, **own), Record()
    trainer.register_hooks([record])
    trainer.train()
    results = trainer.evaluate(Rows(25, seed=1))  # the last rounds are those of some processes
    return {"losses": record.losses, "norms": record.norms, "results": {k: float(v) for k, v in results.items()}}


def files(folder: Path, model: dict[str, Any], updates: int = 3, **own: Any) -> dict[str, Any]:
    """The same of a config file, without an evaluation."""
    accumulation = own.pop("gradient_accumulation_steps", 1)
    data = world_size() // own.get("tensor_parallel_size", 1)
    size = GLOBAL_BATCH // data // accumulation
    cfg = file_config(folder, own, Texts(1), size, data, accumulation, MAX_NORM, updates=updates)
    cfg.model = LazyCall(build)(**model)
    cfg.dataloader.train.dataset = LazyCall(Rows)(length=GLOBAL_BATCH * updates)
    trainer, record = UnsavedTrainer(cfg), Record()
    trainer.register_hooks([record])
    with contextlib.redirect_stdout(None):
        trainer.train()
    return {"losses": record.losses, "norms": record.norms}


APIS = {"objects": objects, "files": files}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # an API, the arguments of `build`, and those of the run


def run_all(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    return [APIS[api](folder / str(number), model, **own) for number, (api, model, own) in enumerate(cases)]


def by_hand(model: nn.Module, updates: int, parts: int) -> dict[str, list[float]]:
    """Losses and norms of a loop in plain torch, whose loss is the mean of those of ``parts`` of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)  # a factor of a gradient changes its step
    rows, losses, norms = Rows(GLOBAL_BATCH * updates).rows, list[float](), list[float]()
    for batch in rows.split(GLOBAL_BATCH):
        loss = torch.stack([model(part, part)["loss"] for part in batch.chunk(parts)]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms}

"""Models and data sets of tests. A class that is itself the case under test stays in its test.

B batch, F features, C classes, L tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainwright import LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import build_image_test_loader, build_image_train_loader
from trainwright.evaluation import DatasetEvaluator
from trainwright.hooks import CallbackHook


class Samples(Dataset[Any]):
    """Samples of ``columns``: tuples, or dicts where the columns have names.

    A column is a sequence, or a function of the index: ``Samples(labels=lambda index: index % 2, length=8)``.
    """

    def __init__(self, *columns: Any, length: int | None = None, **named: Any) -> None:
        self.columns, self.named = columns, named
        self.length = len(next(iter((*columns, *named.values())))) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        index = range(self.length)[index]
        if self.named:
            return {name: _value(column, index) for name, column in self.named.items()}
        return tuple(_value(column, index) for column in self.columns)


def _value(column: Any, index: int) -> Any:
    return column(index) if callable(column) else column[index]


def points(length: int = 16, features: int = 4, seed: int = 0) -> Samples:
    """Random ``inputs`` of two classes, by the sign of their sum."""
    inputs_BF = torch.randn(length, features, generator=torch.Generator().manual_seed(seed))
    return Samples(inputs=inputs_BF, labels=lambda index: int(inputs_BF[index].sum() > 0), length=length)


def pairs(length: int = 50) -> TensorDataset:
    """Tuples of 6 random features and one of 3 classes."""
    inputs_BF = torch.randn(length, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs_BF, torch.randint(3, (length,), generator=torch.Generator().manual_seed(6)))


def pairs_net() -> nn.Module:
    """Layers for :func:`pairs`, with dropout; always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def tokens(length: int = 8) -> Samples:
    """Texts of 5 tokens and two classes, with the fields of a text classification."""
    return Samples(
        token_ids=lambda index: torch.arange(5) + index,
        attention_mask=lambda index: torch.ones(5).long(),
        labels=lambda index: index % 2,
        length=length,
    )


class Stream(IterableDataset[Any]):
    """What ``samples`` holds, or what a function of that name makes, in each pass."""

    def __init__(self, samples: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples() if callable(self.samples) else self.samples)


class Classifier(nn.Module):
    """Linear layers with a cross-entropy: in training the loss, in evaluation the scores.

    Args:
        sizes: features of the input, of each hidden layer, and the number of classes.
        body: in place of layers of these ``sizes``.
        loss: name of the loss among the outputs.
        is_scored: ``False``: the loss in evaluations, too.
    """

    def __init__(
        self,
        sizes: Sequence[int] = (4, 2),
        *,
        dropout: float = 0.0,
        seed: int | None = None,
        body: nn.Module | None = None,
        loss: str = "loss",
        is_scored: bool = True,
    ) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.body = body or layers(sizes, dropout)
        self.loss, self.is_scored = loss, is_scored

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores_BC = self.body(inputs)
        if labels is None or not (self.training or not self.is_scored):
            return {"prediction_scores": scores_BC}
        return {self.loss: F.cross_entropy(scores_BC, labels)}


def layers(sizes: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with Tanh, and dropout if there is any, between them."""
    found: list[nn.Module] = []
    for before, after in pairwise(sizes):
        if found:
            found += [nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
        found.append(nn.Linear(before, after))
    return nn.Sequential(*found)


class WithNorm(nn.Module):
    """Layers ``first``, ``norm`` and ``last`` (3 features, 2 classes) with a cross-entropy; always the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.last(self.norm(self.first(inputs))), labels)}


class Squares(nn.Module):
    """The mean square of what a layer makes of ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Tied(nn.Module):
    """An embedding of 6 tokens, a layer, and a head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BL: Tensor) -> Any:
        return self.head(self.inner(self.embedding(ids_BL)))


def llama(*, is_tied: bool = False) -> Any:
    """A small Llama of transformers for 32 tokens; always the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=is_tied, **sizes))


def assert_equal_weights(a: Any, b: Any) -> None:
    """Bit for bit; buffers, too."""
    for (name, left), right in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


class NanGradient(torch.autograd.Function):
    """The identity, with a gradient that is NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class Results(DatasetEvaluator):
    """An evaluator that gives one value after the other, and repeats the last: ``Results(score=[0.3, 0.9])``."""

    def __init__(self, **values: Sequence[float]) -> None:
        self.values, self.num_evaluations = values, 0

    def reset(self) -> None: ...

    def process(self, inputs: Any, outputs: Any) -> None: ...

    def evaluate(self) -> dict[str, float]:
        self.num_evaluations += 1
        return {name: values[min(self.num_evaluations, len(values)) - 1] for name, values in self.values.items()}


class OwnStep(Trainer):
    """A step of the user's own, of a model that returns its loss."""

    def train_step(self, model: Any, inputs: Any) -> dict[str, Any]:
        loss = model(**inputs)["loss"]
        self.backward(loss)
        self.step()
        return {"step_loss": loss.detach()}


def quiet(folder: Path, **settings: Any) -> TrainingConfig:
    """Settings of the Python API: without a bar, curves, a schedule and an early end where ``settings`` has none."""
    usual = {"progress_bar": False, "tensorboard": None, "lr_scheduler_type": None, "early_stopping": None}
    return TrainingConfig(output_dir=folder, **{**usual, **settings})


def file_config(folder: Path, model: Any, data: Any, test: Any = None, **train: Any) -> DictConfig:
    """The default configuration with a model and data: each a function that makes it, or a node of a configuration."""
    cfg = get_config("common/defaults.py")
    cfg.model = _node(model)
    cfg.dataloader = {"train": LazyCall(build_image_train_loader)(dataset=_node(data), num_workers=0)}
    if test is not None:
        cfg.dataloader.test = [LazyCall(build_image_test_loader)(dataset=_node(test), num_workers=0)]
    cfg.train.update({"output_dir": str(folder), **train})
    return cfg


def _node(part: Any) -> Any:
    return LazyCall(part)() if callable(part) else part


class StopHereError(Exception):
    pass


def trained(trainer: Any, *, stop: int | None = None) -> Any:
    """Train; with ``stop`` until that iteration is about to begin."""

    def leave(at: Any) -> None:
        if at.iter == stop:
            raise StopHereError

    trainer.register_hooks([CallbackHook(before_step=leave)])
    if stop is None:
        trainer.train()
    else:
        try:
            trainer.train()
        except StopHereError:
            return trainer
        raise AssertionError(f"the training ended before iteration {stop}")
    return trainer

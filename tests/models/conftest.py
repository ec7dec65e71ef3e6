"""A model of a user's own, as small as one can be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.models import Model, ModelConfig, ModelOutput, register_model
from trainwright.tasks.preprocessor import Preprocessor, PreprocessorConfig, register_preprocessor


@dataclass
class LengthsConfig(PreprocessorConfig):
    name = "lengths_of_words"
    scale: float = 1.0


@register_preprocessor("lengths_of_words", config_class=LengthsConfig)
class Lengths(Preprocessor):
    def __call__(
        self, texts: list[str], *, return_tensors: str | None = None, offset: float = 0.0
    ) -> dict[str, Tensor]:
        rows = [[float(len(word)) for word in [*text.split(), "", ""][:2]] for text in texts]
        return {"lengths": torch.tensor(rows) * self.config.scale + offset}


@dataclass
class TinyConfig(ModelConfig):
    name = "tiny_of_tests"
    width: int = 2
    num_classes: int = 3


@register_model("tiny_of_tests", config_class=TinyConfig)
class Tiny(Model):
    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.linear = nn.Linear(self.config.width, self.config.num_classes)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(self.config.num_classes)

    def forward(self, lengths: Tensor, bias: float = 0.0) -> dict[str, Tensor]:
        return {"logits": self.norm(self.dropout(self.linear(lengths))) + bias}

    def preprocess(self, inputs: Any, offset: float = 0.0) -> Any:
        return super().preprocess(inputs, offset=offset)

    def post_process(self, outputs: Any, as_text: bool = True) -> list[ModelOutput]:
        ids = outputs["logits"].argmax(dim=-1).tolist()
        return [ModelOutput(label=f"class {i}" if as_text else i) for i in ids]


@pytest.fixture
def tiny() -> Tiny:
    """A model that has been trained for a step, so that no weight or buffer is what it begins with."""
    torch.manual_seed(0)
    model = Tiny(TinyConfig())
    model.compute_loss(model(torch.randn(8, 2))["logits"], torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()
    model.preprocessor = Lengths(LengthsConfig(scale=2.0))
    return model


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder, with their content."""
    return lambda folder: {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

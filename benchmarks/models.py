"""The models: a tiny MLP, a GPT, a ResNet-18 for small images; and random data for them.

B samples of a batch, L tokens, D features, V words.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MLP_SIZES = (32, 64, 10)


class MLP(nn.Module):
    """32 features, 64 hidden units, 10 classes: the overhead of a step is most visible with it."""

    def __init__(self) -> None:
        super().__init__()
        features, hidden, classes = MLP_SIZES
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Layer(nn.Module):
    """A pre-norm transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        qkv = self.to_qkv(self.attention_norm(x_BLD)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLD = x_BLD + self.from_heads(heads.transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.mlp_norm(x_BLD)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT-2: by default 10 million parameters; ``GPT(50304, 1024, 24, 16, 1024)`` has 406 million."""

    def __init__(self, words: int = 4096, width: int = 320, layers: int = 6, heads: int = 5, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("place_numbers", torch.arange(length), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BL: Tensor) -> Tensor:
        hidden = self.words(x_BL) + self.places(self.place_numbers[: x_BL.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class SplitLayer(nn.Module):
    """`Layer` with a matrix for each of query, key and value, whose heads can be split over processes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.from_heads = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        normed = self.attention_norm(x_BLD)
        parts = (matrix(normed).unflatten(-1, (-1, self.head_width)) for matrix in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLD = x_BLD + self.from_heads(heads.transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.mlp_norm(x_BLD)), approximate="tanh"))


class SplitGPT(nn.Module):
    """A GPT of ten million parameters, or a tiny one, that can be split (tensor parallel) and cut (pipeline parallel).

    Returns its loss; with labels None the scores.
    """

    tensor_plan = {  # noqa: RUF012  # a constant of the class
        **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
        **{f"layers.*.{name}": "rowwise" for name in ("from_heads", "down")},
    }
    pipeline_layers = "layers"

    def __init__(self, words: int = 4096, width: int = 320, layers: int = 6, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(SplitLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def before_layers(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.words(x) + self.places(torch.arange(x.shape[1]))

    def after_layers(self, hidden: Tensor, x: Tensor | None, labels: Tensor | None = None) -> Any:
        scores = self.head(self.norm(hidden))
        return scores if labels is None else {"loss": loss_of(scores, labels)}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.before_layers(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.after_layers(hidden, x, labels)


TINY = {"words": 64, "width": 32, "layers": 2, "heads": 2, "length": 16}


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def resnet18() -> nn.Module:
    """ResNet-18 with a first layer for images of 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(before, width, 1 if width == 64 else 2), Residual(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def gpt_medium() -> nn.Module:
    """GPT-2 with 24 layers of width 1024 and sequences of 1024; the vocabulary is rounded up to a multiple of 128."""
    return GPT(words=50304, width=1024, layers=24, heads=16, length=1024)


MODELS: dict[str, Any] = {
    "mlp": MLP,
    "gpt": GPT,
    "resnet": resnet18,
    "gpt_medium": gpt_medium,
    "gpt_split": SplitGPT,
    "gpt_split_tiny": partial(SplitGPT, **TINY),
}
WORDS_AND_LENGTH = {"gpt_medium": (50304, 1024), "gpt_split_tiny": (TINY["words"], TINY["length"])}


def flops_of_step(model: str, batch: int) -> float | None:
    """Floating-point operations of forward and backward of a GPT, by the count of Chowdhery et al. 2022, appendix B:
    6 for each parameter of a matrix product and token, and 12 x layers x width x length for a token's attention. None
    for other models.
    """
    if not model.startswith("gpt"):
        return None
    with torch.device("meta"):
        net: GPT = MODELS[model]()
    length, width = net.places.weight.shape
    multiplied = sum(p.numel() for p in net.parameters()) - net.words.weight.numel() - net.places.weight.numel()
    return batch * length * (6 * multiplied + 12 * len(net.layers) * width * length)


def random_data(model: str, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of ``length`` samples, always the same."""
    generator = torch.Generator().manual_seed(1)
    if model.startswith("gpt"):
        words, tokens = WORDS_AND_LENGTH.get(model, (4096, 128))
        text = torch.randint(words, (length, tokens + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
    shape = (3, 32, 32) if model == "resnet" else (MLP_SIZES[0],)
    return torch.randn(length, *shape, generator=generator), torch.randint(10, (length,), generator=generator)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the samples, or over the tokens."""
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten())


class WithLoss(nn.Module):
    """A model with the fields of a batch as arguments, which returns the loss by name."""

    def __init__(self, net: nn.Module, *, gives_scores: bool = False) -> None:
        super().__init__()
        self.net, self.gives_scores = net, gives_scores

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        loss = {"loss": loss_of(scores, labels)}
        return loss | {"logits": scores} if self.gives_scores else loss

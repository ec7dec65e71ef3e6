"""BERT (Devlin et al. 2018), a bidirectional encoder of texts. Its weights have the names that published ones have.

B batch, L tokens (padded), D hidden_size, N heads, H features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.config.errors import ConfigError
from trainwright.models.config import ModelConfig, check_positive, check_share
from trainwright.models.model import Model
from trainwright.models.registry import register_model

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


@dataclass
class BertConfig(ModelConfig):
    """What a BERT is made of; the defaults are those of the "base" size.

    Args:
        vocab_size: how many tokens there are.
        max_position_embeddings: most tokens of a text.
        hidden_act: "gelu" or "relu".

    Raises:
        ConfigError, ConfigTypeError: a value that no network can be made of.
    """

    name = "bert"
    ignored_keys = frozenset({"position_embedding_type", "use_cache", "num_labels", "bos_token_id", "eos_token_id"})

    vocab_size: int = 42000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_positive(self, *sizes, "max_position_embeddings", "type_vocab_size")
        check_share(self, "hidden_dropout_prob", "attention_probs_dropout_prob")
        check_heads(self)
        if self.hidden_act not in _ACTIVATIONS:
            raise ConfigError(f"{type(self).__name__}.hidden_act: got {self.hidden_act!r}; allowed: gelu, relu.")


def check_heads(config: ModelConfig) -> None:
    """Raise ConfigError if the heads do not share the hidden features evenly."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    if size % heads:
        raise ConfigError(
            f"{type(config).__name__}: hidden_size {size} is not a multiple of num_attention_heads {heads}."
        )


@register_model("bert", config_class=BertConfig)
class Bert(Model):
    """The encoder alone: a base, whose weights others begin with."""

    preprocessor_kind = "tokenizer"
    base_model_prefix = "bert"
    skip_keys_on_load = ("bert.embeddings.position_ids",)  # 0, 1, 2, ..., which older files carry

    def __init__(self, config: BertConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.bert = BertEncoder(self.config)

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """``hidden_states`` (B, L, D) of the tokens and ``pooled`` (B, D) of the first one."""
        hidden_BLD, pooled_BD = self.bert(token_ids, attention_mask, token_type_ids)
        return {"hidden_states": hidden_BLD, "pooled": pooled_BD}


class BertEncoder(nn.Module):
    """Tokens to features. ``attention_mask`` (B, L) is 1 for tokens and 0 for padding; None means no padding."""

    def __init__(self, config: BertConfig, *, has_pooler: bool = True) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Stack(config)
        self.pooler = _Dense(config.hidden_size, config.hidden_size, torch.tanh) if has_pooler else None
        self.apply(lambda module: _init(module, config.initializer_range))

    def forward(
        self, token_ids_BL: Tensor, attention_mask_BL: Tensor | None = None, token_type_ids_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features (B, L, D) of all tokens, and (B, D) of the first one if there is a pooler.

        Raises:
            ConfigError: a text has more tokens than positions.
        """
        mask = None if attention_mask_BL is None else attention_mask_BL[:, None, None, :].bool()
        hidden_BLD = self.encoder(self.embeddings(token_ids_BL, token_type_ids_BL), mask)
        return hidden_BLD, None if self.pooler is None else self.pooler(hidden_BLD[:, 0])


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, token_ids_BL: Tensor, token_type_ids_BL: Tensor | None) -> Tensor:
        length = token_ids_BL.shape[1]
        check_length(length, self.position_embeddings.num_embeddings)
        if token_type_ids_BL is None:
            token_type_ids_BL = torch.zeros_like(token_ids_BL)
        embedded_BLD = self.word_embeddings(token_ids_BL) + self.token_type_embeddings(token_type_ids_BL)
        x: Tensor = self.dropout(self.LayerNorm(embedded_BLD + self.position_embeddings.weight[:length]))
        return x


class _Stack(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layer:
            x_BLD = layer(x_BLD, mask)
        return x_BLD


class _Layer(nn.Module):
    """Attention, then two dense layers; each is added to what goes in and normalized after that."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        activation = _ACTIVATIONS[config.hidden_act]
        self.intermediate = _Dense(config.hidden_size, config.intermediate_size, activation)
        self.output = _Output(config.intermediate_size, config)

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        x_BLD = self.attention(x_BLD, mask)
        y: Tensor = self.output(self.intermediate(x_BLD), x_BLD)
        return y


class _Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self = nn.ModuleDict({name: nn.Linear(size, size) for name in ("query", "key", "value")})
        self.output = _Output(config.hidden_size, config)
        self._num_heads = config.num_attention_heads
        self._dropout = config.attention_probs_dropout_prob

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        parts = [linear(x_BLD).unflatten(-1, (self._num_heads, -1)) for linear in self.self.values()]
        q, k, v = (part.transpose(1, 2) for part in parts)
        dropout = self._dropout if self.training else 0.0
        y_BNLH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        y: Tensor = self.output(y_BNLH.transpose(1, 2).flatten(2), x_BLD)
        return y


class _Dense(nn.Module):
    def __init__(self, in_features: int, out_features: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self._activation(self.dense(x))


class _Output(nn.Module):
    def __init__(self, in_features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual_BLD: Tensor) -> Tensor:
        y: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual_BLD)
        return y


def check_length(length: int, limit: int) -> None:
    """Raise ConfigError if a text has more tokens than the model has positions."""
    if length > limit:
        raise ConfigError(
            f"token_ids: a text has {length} tokens, the model has positions for {limit} (max_position_embeddings). "
            "Give the dataset or the tokenizer a max_length."
        )


def _init(module: nn.Module, deviation: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()

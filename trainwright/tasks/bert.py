"""BERT (Devlin et al. 2018), a bidirectional encoder of texts, by transformers; alone, and the base of models of tasks.

B batch, L tokens (padded), D hidden_size, C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainwright.base.errors import ConfigError, ConfigTypeError, import_optional
from trainwright.config.yaml_config import check_positive
from trainwright.models.config import ModelConfig
from trainwright.models.model import Model, register_model
from trainwright.tasks.labels import id2label_of_model
from trainwright.tasks.sizes import check_heads, check_length, check_share


@dataclass
class BertConfig(ModelConfig):
    """Sizes of a BERT; the defaults are those of the "base" size.

    Args:
        vocab_size: number of tokens.
        max_position_embeddings: maximum number of tokens of a text.
        hidden_act: "gelu" or "relu".

    Raises:
        ConfigError, ConfigTypeError: a value that no network can have.
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
        if self.hidden_act not in ("gelu", "relu"):
            raise ConfigError(f"{type(self).__name__}.hidden_act: got {self.hidden_act!r}; allowed: gelu, relu.")


class BertBase(Model):
    """A `transformers.BertModel` as ``bert``: weights have the names of published ones."""

    preprocessor_kind = "tokenizer"
    base_model_prefix = "bert"
    skip_keys_on_load = ("bert.embeddings.position_ids",)  # 0, 1, 2, ..., part of older files
    has_pooler: ClassVar[bool] = True
    pipeline_layers = "bert.encoder.layer"
    tensor_plan: ClassVar[dict[str, str]] = {
        "bert.embeddings.word_embeddings": "embedding_rowwise",
        "bert.encoder.layer.*.attention.self.query": "colwise",
        "bert.encoder.layer.*.attention.self.key": "colwise",
        "bert.encoder.layer.*.attention.self.value": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise",
        "bert.encoder.layer.*.intermediate.dense": "colwise",
        "bert.encoder.layer.*.output.dense": "rowwise",
    }

    def __init__(self, config: BertConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        message = "BERT needs the package transformers: pip install transformers."
        transformers = import_optional("transformers", message)
        sizes = {field: getattr(self.config, field) for field in BertConfig.__dataclass_fields__}
        settings = transformers.BertConfig(**sizes, attn_implementation="sdpa")
        self.bert = transformers.BertModel(settings, add_pooling_layer=self.has_pooler)

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The outputs that the class describes. ``attention_mask`` (B, L) is 1 for tokens and 0 for padding.

        Raises:
            ConfigError: a text has more tokens than positions.
        """
        check_length(token_ids.shape[1], self.config.max_position_embeddings)
        (mask,) = self.layer_arguments(token_ids, attention_mask)
        hidden_BLD, *pooled_BD = self.bert(
            input_ids=token_ids, attention_mask=mask, token_type_ids=token_type_ids, return_dict=False
        )
        return self._outputs(hidden_BLD, pooled_BD[0] if pooled_BD else None)

    # Where the model is cut into pipeline stages.

    def before_layers(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        check_length(token_ids.shape[1], self.config.max_position_embeddings)
        embeddings: Tensor = self.bert.embeddings(input_ids=token_ids, token_type_ids=token_type_ids)
        return embeddings

    def layer_arguments(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor | None]:
        # transformers reads a mask of two dimensions on the host, to see whether it hides a token: a GPU would wait.
        return (None if attention_mask is None else attention_mask[:, None, None, :].bool(),)

    def after_layers(self, hidden: Tensor, *batch: Any, **named: Any) -> dict[str, Tensor]:
        """The outputs of ``forward``, from the features (B, L, D) of the last layer."""
        pooled = None if self.bert.pooler is None else self.bert.pooler(hidden)
        return self._outputs(hidden, pooled)

    def _outputs(self, hidden_BLD: Tensor, pooled_BD: Any) -> dict[str, Tensor]:
        return {"hidden_states": hidden_BLD, "pooled": pooled_BD}


@register_model("bert", config_class=BertConfig)
class Bert(BertBase):
    """The encoder alone: a base model for others (`init_weights`).

    Its outputs are ``hidden_states`` (B, L, D) of the tokens and ``pooled`` (B, D) of the first one.
    """


@dataclass
class BertWithLabelsConfig(BertConfig):
    """A `BertConfig`, and ``id2label``: the labels by id."""

    id2label: Mapping[int, str] | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = id2label_of_model(self.id2label, type(self).__name__)


class BertWithHead(BertBase):
    def __init__(self, config: BertWithLabelsConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, len(self.config.id2label))
        self._init_weights(self.classifier)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.classifier:
            nn.init.normal_(self.classifier.weight, std=self.config.initializer_range)
            nn.init.zeros_(self.classifier.bias)


def scores_of(outputs: Any, *, classes_dim: int) -> Tensor | None:
    """The scores of classes in a model's outputs; None for ids."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.dim() == classes_dim:
        return outputs
    if isinstance(outputs, list | tuple) or (isinstance(outputs, Tensor) and not outputs.is_floating_point()):
        return None
    got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ConfigTypeError(f"post_process: got {got}; it takes the model's outputs with 'logits', or ids of labels.")


def ids_of(outputs: Any) -> Tensor:
    outputs = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    return outputs if isinstance(outputs, Tensor) else torch.as_tensor(outputs)

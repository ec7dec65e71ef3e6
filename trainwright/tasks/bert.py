"""BERT (Devlin et al. 2018), a bidirectional encoder of texts, by transformers; alone, and with a head for tasks.

B batch, L tokens (padded), D hidden_size, C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError, ConfigTypeError, import_optional
from trainwright.config.yaml_config import check_positive
from trainwright.models.config import (
    ModelConfig,
    check_heads,
    check_length,
    check_share,
    checked_labels,
)
from trainwright.models.model import Model, ModelOutput, register_model


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


@dataclass
class BertTextClassificationConfig(BertConfig):
    """A `BertConfig`, and ``id2label``: the labels by id."""

    name = "bert_text_classification"

    id2label: Mapping[int, str] | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = checked_labels(self.id2label, type(self).__name__)


@dataclass
class BertSequenceLabelingConfig(BertTextClassificationConfig):
    """A `BertConfig`, and ``id2label``: the labels of tokens by id, such as "O", "B-PER", "I-PER"."""

    name = "bert_sequence_labeling"


class _Bert(Model):
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
        message = "BERT needs the package transformers: pip install 'trainwright[texts]'."
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
class Bert(_Bert):
    """The encoder alone: a base model for others (`init_weights`).

    Its outputs are ``hidden_states`` (B, L, D) of the tokens and ``pooled`` (B, D) of the first one.
    """


class _BertWithHead(_Bert):
    def __init__(self, config: BertTextClassificationConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.dropout = nn.Dropout(self.config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.config.hidden_size, len(self.config.id2label))
        nn.init.normal_(self.classifier.weight, std=self.config.initializer_range)
        nn.init.zeros_(self.classifier.bias)


@register_model("bert_text_classification", config_class=BertTextClassificationConfig)
class BertTextClassification(_BertWithHead):
    """One label for a text: ``token_ids`` (B, L) to ``logits`` (B, C), the scores of the labels."""

    def _outputs(self, hidden_BLD: Tensor, pooled_BD: Any) -> dict[str, Tensor]:
        return {"logits": self.classifier(self.dropout(pooled_BD))}

    def post_process(self, outputs: Any) -> list[ModelOutput]:
        """``label`` and ``score``, its probability, for each text; of ids of labels (B,) the label alone.

        Negative ids, which are no labels, are omitted.
        """
        scores = _scores(outputs, classes_dim=2)
        if scores is None:
            return [ModelOutput(label=self.config.id2label[i]) for i in _ids(outputs).flatten().tolist() if i >= 0]
        best = scores.float().softmax(dim=-1).max(dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [ModelOutput(label=self.config.id2label[i], score=score) for i, score in pairs]


@register_model("bert_sequence_labeling", config_class=BertSequenceLabelingConfig)
class BertSequenceLabeling(_BertWithHead):
    """A label for each token: ``token_ids`` (B, L) to ``logits`` (B, L, C), the scores of the labels.

    Labels of -100 do not count.
    """

    has_pooler = False

    def _outputs(self, hidden_BLD: Tensor, pooled_BD: Any) -> dict[str, Tensor]:
        return {"logits": self.classifier(self.dropout(hidden_BLD))}

    def post_process(
        self, outputs: Any, attention_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> list[ModelOutput]:
        """``labels``, a list of a label for each token, for each text: from outputs, or from ids of labels (B, L).

        Negative ids, padding according to ``attention_mask``, and the begin and end tokens of ``token_ids`` (if the
        model has a tokenizer that defines them) are skipped.
        """
        scores = _scores(outputs, classes_dim=3)
        ids_BL = _ids(outputs) if scores is None else scores.argmax(dim=-1)
        if attention_mask is not None:
            ids_BL = ids_BL.masked_fill(attention_mask == 0, -100)
        if token_ids is not None and self.preprocessor is not None:
            ids_BL = ids_BL.masked_fill(self._is_frame(token_ids), -100)
        id2label = self.config.id2label
        return [ModelOutput(labels=[id2label[i] for i in row if i >= 0]) for row in ids_BL.tolist()]

    def _is_frame(self, token_ids: Tensor) -> Tensor:
        """Which tokens (B, L) are begin or end tokens, which are not part of the text."""
        tokenizer = self._part("tokenizer")
        frame = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")} - {None}
        return torch.isin(token_ids, torch.tensor(sorted(frame), dtype=token_ids.dtype, device=token_ids.device))


def _scores(outputs: Any, *, classes_dim: int) -> Tensor | None:
    """The scores of classes in a model's outputs; None for ids."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.dim() == classes_dim:
        return outputs
    if isinstance(outputs, list | tuple) or (isinstance(outputs, Tensor) and not outputs.is_floating_point()):
        return None
    got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ConfigTypeError(f"post_process: got {got}; it takes the model's outputs with 'logits', or ids of labels.")


def _ids(outputs: Any) -> Tensor:
    outputs = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    return outputs if isinstance(outputs, Tensor) else torch.as_tensor(outputs)

"""BERT with a head: one label for a text, or one for each token.

B batch, L tokens (padded), C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigTypeError
from trainwright.models.bert import BertConfig, BertEncoder
from trainwright.models.config import settle_labels
from trainwright.models.model import Model
from trainwright.models.outputs import ModelOutput
from trainwright.models.registry import register_model


@dataclass
class BertTextClassificationConfig(BertConfig):
    """A `BertConfig`, and ``id2label``: the labels by id."""

    name = "bert_text_classification"

    id2label: Mapping[int, str] | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.id2label = settle_labels(self.id2label, type(self).__name__)


@dataclass
class BertSequenceLabelingConfig(BertTextClassificationConfig):
    """A `BertConfig`, and ``id2label``: the labels of tokens by id, such as "O", "B-PER", "I-PER"."""

    name = "bert_sequence_labeling"


class _BertWithHead(Model):
    preprocessor_kind = "tokenizer"
    base_model_prefix = "bert"
    skip_keys_on_load = ("bert.embeddings.position_ids",)
    _reads_first_token: bool

    def __init__(self, config: BertTextClassificationConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        config = self.config
        self.bert = BertEncoder(config, has_pooler=self._reads_first_token)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label or ()))
        nn.init.normal_(self.classifier.weight, std=config.initializer_range)
        nn.init.zeros_(self.classifier.bias)


@register_model("bert_text_classification", config_class=BertTextClassificationConfig)
class BertTextClassification(_BertWithHead):
    """One label for a text: ``token_ids`` (B, L) to ``logits`` (B, C)."""

    _reads_first_token = True

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Scores of the labels. ``attention_mask`` (B, L) is 1 for tokens and 0 for padding."""
        _, pooled_BD = self.bert(token_ids, attention_mask, token_type_ids)
        return {"logits": self.classifier(self.dropout(pooled_BD))}

    def post_process(self, outputs: Any) -> list[ModelOutput]:
        """``label`` and ``score``, its probability, for each text; of ids of labels (B,) the label alone.

        Negative ids, which stand for no label, are left out.
        """
        scores = _scores(outputs, classes_dim=2)
        if scores is None:
            return [ModelOutput(label=self.config.id2label[i]) for i in _ids(outputs).flatten().tolist() if i >= 0]
        best = scores.float().softmax(dim=-1).max(dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [ModelOutput(label=self.config.id2label[i], score=score) for i, score in pairs]


@register_model("bert_sequence_labeling", config_class=BertSequenceLabelingConfig)
class BertSequenceLabeling(_BertWithHead):
    """A label for each token: ``token_ids`` (B, L) to ``logits`` (B, L, C). Labels of -100 do not count."""

    _reads_first_token = False

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Scores of the labels. ``attention_mask`` (B, L) is 1 for tokens and 0 for padding."""
        hidden_BLD, _ = self.bert(token_ids, attention_mask, token_type_ids)
        return {"logits": self.classifier(self.dropout(hidden_BLD))}

    def post_process(
        self, outputs: Any, attention_mask: Tensor | None = None, token_ids: Tensor | None = None
    ) -> list[ModelOutput]:
        """``labels``, a list of a label for each token, for each text: from outputs, or from ids of labels (B, L).

        Left out are negative ids, padding by ``attention_mask``, and the tokens of ``token_ids`` that begin and end a
        text, if the model has a tokenizer to tell them by.
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
        """Which tokens (B, L) begin or end a text: nobody has written them."""
        tokenizer = self._part("tokenizer")
        frame = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")} - {None}
        return torch.isin(token_ids, torch.tensor(sorted(frame), dtype=token_ids.dtype, device=token_ids.device))


def _scores(outputs: Any, *, classes_dim: int) -> Tensor | None:
    """The scores of classes in a model's outputs; None of what is ids.

    Raises:
        ConfigTypeError: it is neither.
    """
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

"""BERT with a head that labels tokens.

B batch, L tokens (padded), C labels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.models.model import ModelOutput, register_model
from trainwright.tasks.bert import BertWithHead, BertWithLabelsConfig, ids_of, scores_of


@dataclass
class BertSequenceLabelingConfig(BertWithLabelsConfig):
    """A `BertConfig`, and ``id2label``: the labels of tokens by id, such as "O", "B-PER", "I-PER"."""

    name = "bert_sequence_labeling"


@register_model("bert_sequence_labeling", config_class=BertSequenceLabelingConfig)
class BertSequenceLabeling(BertWithHead):
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
        scores = scores_of(outputs, classes_dim=3)
        ids_BL = ids_of(outputs) if scores is None else scores.argmax(dim=-1)
        if attention_mask is not None:
            ids_BL = ids_BL.masked_fill(attention_mask == 0, -100)
        if token_ids is not None and self.preprocessor is not None:
            tokenizer = self._part("tokenizer")
            frame = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")} - {None}
            ids_BL = ids_BL.masked_fill(torch.isin(token_ids, token_ids.new_tensor(sorted(frame))), -100)
        id2label = self.config.id2label
        return [ModelOutput(labels=[id2label[i] for i in row if i >= 0]) for row in ids_BL.tolist()]

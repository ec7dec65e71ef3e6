"""BERT with a head that classifies texts.

B batch, L tokens (padded), C labels.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainwright.models.model import ModelOutput, register_model
from trainwright.tasks.bert import BertWithHead, BertWithLabelsConfig, ids_of, scores_of


@dataclass
class BertTextClassificationConfig(BertWithLabelsConfig):
    """A `BertConfig`, and ``id2label``: the labels by id."""

    name = "bert_text_classification"


@register_model("bert_text_classification", config_class=BertTextClassificationConfig)
class BertTextClassification(BertWithHead):
    """One label for a text: ``token_ids`` (B, L) to ``logits`` (B, C), the scores of the labels."""

    def _outputs(self, hidden_BLD: Tensor, pooled_BD: Any) -> dict[str, Tensor]:
        return {"logits": self.classifier(self.dropout(pooled_BD))}

    def post_process(self, outputs: Any) -> list[ModelOutput]:
        """``label`` and ``score``, its probability, for each text; of ids of labels (B,) the label alone.

        Negative ids, which are no labels, are omitted.
        """
        scores = scores_of(outputs, classes_dim=2)
        if scores is None:
            return [ModelOutput(label=self.config.id2label[i]) for i in ids_of(outputs).flatten().tolist() if i >= 0]
        best = scores.float().softmax(dim=-1).max(dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [ModelOutput(label=self.config.id2label[i], score=score) for i, score in pairs]

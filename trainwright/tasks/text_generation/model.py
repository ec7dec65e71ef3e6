"""A small decoder of texts, as GPT-2 (Radford et al. 2019): each token is predicted from those before it.

B batch, L tokens (padded), D hidden_size, N heads, H features of a head, V tokens of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.config.yaml_config import check_positive
from trainwright.models.config import ModelConfig
from trainwright.models.model import Model, ModelOutput, register_model
from trainwright.parallel.context import mask_of_texts
from trainwright.tasks.labels import characters_of_model
from trainwright.tasks.sizes import check_heads, check_length, check_share


@dataclass
class GPTTextGenerationConfig(ModelConfig):
    """Sizes and settings of a `GPTTextGeneration`.

    Args:
        vocab_size: number of tokens; None means those of ``id2label``.
        id2label: the text of each token, for a model without a tokenizer; special tokens have the text "".
        intermediate_size: of the dense layers; None means four times ``hidden_size``.
        max_position_embeddings: maximum number of tokens of a text, prompt and answer together.
        max_new_tokens: number of tokens that ``generate`` adds by default.
        eos_token_id: ends an answer; None: no token does.

    Raises:
        ConfigError, ConfigTypeError: a value that no network can have.
    """

    name = "gpt_text_generation"

    vocab_size: int | None = None
    id2label: Mapping[int, str] | Sequence[str] | None = None
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    max_position_embeddings: int = 256
    hidden_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    pad_token_id: int = 0
    eos_token_id: int | None = None
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.id2label is not None:
            where = type(self).__name__
            self.id2label = characters_of_model(self.id2label, self.pad_token_id, "pad_token_id", where)
        if self.vocab_size is None and self.id2label is not None:
            self.vocab_size = len(self.id2label)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        check_positive(self, *sizes, "max_position_embeddings", "max_new_tokens")
        check_share(self, "hidden_dropout_prob")
        check_heads(self)


@register_model("gpt_text_generation", config_class=GPTTextGenerationConfig)
class GPTTextGeneration(Model):
    """Continues a text: ``token_ids`` (B, L) to ``logits`` (B, L, V) of the token after each.

    Labels are the token ids themselves, -100 at padding and in prompts, where no loss is computed. They are shifted
    here, not in the data.
    """

    is_generative = True
    loss_type = "ForCausalLM"
    preprocessor_kind = "tokenizer"
    pipeline_layers = "blocks"
    tensor_plan: ClassVar[dict[str, str]] = {
        "token_embedding": "embedding_rowwise",
        "dropout": "sequence_begin",
        "blocks.*.norm[12]": "norm",
        "blocks.*.[qkv]": "colwise",
        "blocks.*.projection": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "norm": "norm",
        "head": "colwise_loss",
    }

    def __init__(self, config: GPTTextGenerationConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        config = self.config
        self.token_embedding = nn.Embedding(config.vocab_size or 0, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size or 0, bias=False)
        self.apply(self._init_weights)
        self.head.weight = self.token_embedding.weight

    def forward(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Scores of the next token at each position.

        Args:
            attention_mask: (B, L), 1 for tokens and 0 for padding, on either side; None means no padding, or padding
                only at the end, which the tokens before it do not attend to.
            position_ids: (B, L), of the tokens in their texts; None: by the mask. Where they begin again, as in
                rows of a `PackedDataset`, another text begins: without a mask, texts do not attend to each other.

        Raises:
            ConfigError: a text has more tokens than positions.
        """
        x_BLD = self.before_layers(token_ids, attention_mask, position_ids)
        (mask,) = self.layer_arguments(token_ids, attention_mask, position_ids)
        for block in self.blocks:
            x_BLD = block(x_BLD, mask)
        return self.after_layers(x_BLD)

    # Where the model is cut into pipeline stages.

    def before_layers(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        length = token_ids.shape[1]
        check_length(length, self.config.max_position_embeddings)
        if position_ids is not None:
            positions = position_ids
        elif attention_mask is None:
            positions = torch.arange(length, device=token_ids.device)
        else:
            positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        x_BLD: Tensor = self.dropout(self.token_embedding(token_ids) + self.position_embedding(positions))
        return x_BLD

    def layer_arguments(
        self, token_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor | None]:
        if attention_mask is not None:
            return (_mask_of(attention_mask),)
        return (None if position_ids is None else mask_of_texts(position_ids),)

    def after_layers(self, hidden: Tensor, *batch: Any, **named: Any) -> dict[str, Tensor]:
        return {"logits": self.head(self.norm(hidden))}

    def compute_loss(self, logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of each next token that is a label; ``shift_labels``: these tokens, if they are known."""
        if shift_labels is not None:
            return super().compute_loss(logits, shift_labels)
        return super().compute_loss(logits[:, :-1], labels[:, 1:])

    def generate(
        self,
        token_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The tokens that follow each prompt: int64, (B, longest answer), padded with ``pad_token_id``.

        An answer ends with ``eos_token_id``, which is part of it. Rows do not see each other, or their padding.

        Args:
            attention_mask: 1 for tokens of the prompt, 0 for padding; None means no padding.
            labels: of a batch for training: a row's prompt then ends before its first label. Not used otherwise.
            max_new_tokens: by default the config's, or fewer if there are not enough positions.
            temperature: 0 selects the most likely token, a positive number samples from the scores divided by it.
            top_k: sample only from this many most likely tokens.
            generator: for sampling.

        Raises:
            ConfigError: a prompt and ``max_new_tokens`` are more than the positions, or a number out of range.
        """
        if not temperature >= 0:
            raise ConfigError(f"generate.temperature: got {temperature!r}; it must be a number >= 0.")
        for name, number in (("top_k", top_k), ("max_new_tokens", max_new_tokens)):
            if number is not None and number < 1:
                raise ConfigError(f"generate.{name}: got {number!r}; it must be a whole number >= 1, or None.")
        prompts_BL, lengths_B = _prompts(token_ids, attention_mask, labels)
        longest = int(lengths_B.amax())
        count = self._count_new(longest, max_new_tokens)
        pad, eos = self.config.pad_token_id, self.config.eos_token_id
        text_BL = F.pad(prompts_BL[:, :longest], (0, count), value=pad)
        rows = torch.arange(len(text_BL), device=text_BL.device)
        is_done = torch.zeros_like(lengths_B, dtype=torch.bool)
        new_BL = text_BL.new_full((len(text_BL), count), pad)
        for step in range(count):
            logits_BV = self(text_BL[:, : longest + step])["logits"][rows, lengths_B + step - 1]
            next_B = _choose(logits_BV.float(), temperature, top_k, generator).masked_fill(is_done, pad)
            new_BL[:, step] = text_BL[rows, lengths_B + step] = next_B
            if eos is not None:
                is_done |= next_B == eos
                if bool(is_done.all()):
                    return new_BL[:, : step + 1]
        return new_BL

    def post_process(self, outputs: Any) -> list[ModelOutput]:
        """``text`` for each row of ids (generated, or labels, of which negative ones are omitted).

        Of outputs with ``logits``, the most likely token at each position is used.
        """
        if isinstance(outputs, Mapping):
            outputs = outputs.get("generated_ids", outputs.get("logits"))
        if isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.dim() == 3:
            outputs = outputs.argmax(dim=-1)
        rows = outputs.tolist() if isinstance(outputs, Tensor) else outputs
        if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
            raise ConfigTypeError(
                f"post_process: got {type(outputs).__name__}; it takes ids of tokens (B, L), or logits."
            )
        return [ModelOutput(text=self._text([i for i in row if i >= 0])) for row in rows]

    def _text(self, ids: list[int]) -> str:
        eos = self.config.eos_token_id
        ids = ids[: ids.index(eos)] if eos in ids else ids
        ids = [i for i in ids if i != self.config.pad_token_id]
        if self.config.id2label is not None:
            return "".join(self.config.id2label[i] for i in ids)
        if self.preprocessor is None:
            raise ConfigError(
                f"{type(self).__name__}.post_process: there is nothing to read tokens with; set model.preprocessor to "
                "a tokenizer, or id2label in its config."
            )
        text = self._part("tokenizer").decode([ids])  # one text in a list, of our tokenizers
        return text if isinstance(text, str) else "".join(text)

    def _count_new(self, longest: int, max_new_tokens: int | None) -> int:
        room = self.config.max_position_embeddings - longest
        count = min(self.config.max_new_tokens, room) if max_new_tokens is None else max_new_tokens
        if count > room or count < 1:
            raise ConfigError(
                f"generate: the longest prompt has {longest} tokens, and {max(count, 1)} more are wanted; the model "
                f"has positions for {self.config.max_position_embeddings} (max_position_embeddings)."
            )
        return count

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class _Block(nn.Module):
    """Causal attention, then two dense layers; each is normalized first and added to its input."""

    def __init__(self, config: GPTTextGenerationConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size or 0
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.projection = nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.num_heads = config.num_attention_heads
        self._head_size = size // self.num_heads

    def forward(self, x_BLD: Tensor, mask: Tensor | None) -> Tensor:
        y_BLD = self.norm1(x_BLD)
        # -1 heads: a tensor-parallel process has some of them.
        heads = (part(y_BLD).unflatten(-1, (-1, self._head_size)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in heads)
        dropout = self.dropout.p if self.training else 0.0
        y_BNLH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        x_BLD = x_BLD + self.dropout(self.projection(y_BNLH.transpose(1, 2).flatten(2)))
        z_BLD: Tensor = x_BLD + self.dropout(self.down(F.gelu(self.up(self.norm2(x_BLD)))))
        return z_BLD


def _mask_of(attention_mask_BL: Tensor) -> Tensor:
    """The tokens that each token attends to, (B, 1, L, L): those up to itself, and itself even if it is padding."""
    length = attention_mask_BL.shape[1]
    ones = torch.ones(length, length, dtype=torch.bool, device=attention_mask_BL.device)
    sees_token = ones.tril() & attention_mask_BL.bool()[:, None, None, :]
    return sees_token | torch.eye(length, dtype=torch.bool, device=ones.device)


def _prompts(token_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prompts with their padding at the end, and their lengths: at least one token."""
    is_prompt = torch.ones_like(token_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if labels is not None:
        is_prompt = is_prompt & ((labels >= 0).cumsum(dim=1) == 0)
    order = torch.argsort((~is_prompt).to(torch.uint8), dim=1, stable=True)
    return token_ids.gather(1, order), is_prompt.sum(dim=1).clamp(min=1)


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        likeliest_B: Tensor = logits_BV.argmax(dim=-1)
        return likeliest_B
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    probabilities_BV = (logits_BV / temperature).softmax(dim=-1)
    drawn_B1: Tensor = torch.multinomial(probabilities_BV, 1, generator=generator)
    return drawn_B1[:, 0]

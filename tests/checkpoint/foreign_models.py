"""Tiny models of transformers that are saved under other names than they have, for tests of initial weights."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION: dict[str, Any] = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 24}


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**VISION, num_hidden_layers=2, num_attention_heads=2)
    text = hf.LlamaConfig(**GROUPED)
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text))


def _deepseek() -> nn.Module:
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    experts = {"n_routed_experts": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**EXPERTS, **sizes, **experts))


def _swin() -> hf.SwinConfig:
    return hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2)


def _segformer() -> hf.SegformerConfig:
    return hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=12)),
    "Qwen2-MoE": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**EXPERTS, num_experts=4, shared_expert_intermediate_size=8)
    ),
    "Qwen3-MoE": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**EXPERTS, num_experts=4)),
    "DeepSeek-V3": _deepseek,
    "OLMoE": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2)),
    "GPT-NeoX": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
    "LLaVA": _llava,
    "Swin": lambda: hf.SwinForImageClassification(_swin()),
    "SegFormer": lambda: hf.SegformerForSemanticSegmentation(_segformer()),
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
}


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():  # norms are ones in each model otherwise
            parameter.add_(torch.rand_like(parameter))
    return model

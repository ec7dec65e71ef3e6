"""Plans of tensor parallel: where they come from, and which are refused before any process waits for another."""

import ast
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from trainwright.base.errors import ConfigError
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig
from trainwright.parallel.tensor_plan import PlanError, check_plan, tensor_plan


def gpt(**settings: Any) -> GPTTextGeneration:
    sizes = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6}
    return GPTTextGeneration(GPTTextGenerationConfig(**{**sizes, **settings}))


class Fused(nn.Module):
    """Attention whose q, k and v are one layer."""

    tensor_plan: ClassVar[dict[str, str]] = {"qkv": "colwise", "out": "rowwise"}

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)


def faults(model: nn.Module, size: int, plan: dict[str, str] | None = None, **settings: Any) -> str:
    with pytest.raises(PlanError) as raised:
        check_plan(model, tensor_plan(model) if plan is None else plan, size, **settings)
    assert isinstance(raised.value, ConfigError)
    return str(raised.value)


def proposal(model: nn.Module) -> tuple[str, dict[str, str]]:
    """The error of a model without a plan, and the plan that it shows, read as a user pastes it."""
    with pytest.raises(PlanError) as raised:
        tensor_plan(model)
    message = str(raised.value)
    text = message[message.index("{") : message.index("\n  }") + 4]
    plan: dict[str, str] = ast.literal_eval(text)
    return message, plan


def test_the_plan_of_a_model_covers_its_layers_and_the_tied_head() -> None:
    model = gpt()
    words = check_plan(model, tensor_plan(model), 3)
    assert words["blocks.1.q"] == words["blocks.0.up"] == "colwise"
    assert words["token_embedding"] == "embedding_rowwise"
    assert words["head"] == "colwise_loss"


def test_a_part_of_a_model_may_have_the_plan() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language, self.vision = gpt(), nn.Linear(2, 2)

    assert tensor_plan(Net())["language.blocks.*.[qkv]"] == "colwise"


def test_a_model_without_a_plan_is_refused_with_a_plan_to_write() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "n_embd": 12, "n_layer": 2, "n_head": 6}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    message, plan = proposal(model)
    assert "GPT2LMHeadModel has no plan" in message
    assert '"transformer.h.*.mlp.c_fc": "colwise",  # 12 -> 48' in message
    words = check_plan(model, plan, 2)
    assert words["transformer.h.1.mlp.c_fc"] == "colwise"
    assert words["transformer.h.0.mlp.c_proj"] == "rowwise"
    assert words["transformer.h.0.attn.c_attn"] == words["transformer.wte"] == words["lm_head"] == "replicated"
    model.tensor_plan = plan
    assert tensor_plan(model) == plan
    attention = {"": "own_heads", ".c_attn": "colwise_fused", ".c_proj": "rowwise"}
    plan |= {f"transformer.h.*.attn{name}": word for name, word in attention.items()}
    assert "c_attn (colwise_fused) has 36 outputs, and 36 / 3 / 5 is not" in faults(model, 5, plan)


class Gated(nn.Module):
    """Layers around a hidden one, which two layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(4, 8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.classes = nn.Linear(8, 2)


def test_the_plan_to_write_divides_hidden_layers_only() -> None:
    _, plan = proposal(nn.Sequential(Gated(), Gated()))
    words = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    whole = dict.fromkeys(("table", "qkv", "out", "classes"), "replicated")
    assert plan == {f"{part}.{name}": word for part in (0, 1) for name, word in {**words, **whole}.items()}
    assert check_plan(nn.Sequential(Gated(), Gated()), plan, 2) == plan


def test_a_model_without_a_layer_that_can_be_cut_is_refused() -> None:
    with pytest.raises(PlanError, match="Sequential has no plan") as raised:
        tensor_plan(nn.Sequential(nn.Conv1d(2, 2, 2)))
    assert "no layer that can be cut" in str(raised.value)
    assert "ZeRO" in str(raised.value)


def test_all_faults_are_in_one_message() -> None:
    plan = {"blocks.*.qq": "colwise", "blocks.*.up": "colwize", "blok.*.up": "colwise", "norm": "colwise"}
    message = faults(gpt(), 2, plan)
    assert "'blocks.*.qq' matches no module. blocks.0 has no 'qq'. Did you mean 'q'?" in message
    assert "there is no style 'colwize'. Did you mean 'colwise'?" in message
    assert "The model has no 'blok'. Did you mean 'blocks'?" in message
    assert "norm is a LayerNorm; 'colwise' cuts an nn.Linear" in message


def test_sizes_and_heads_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    assert "blocks.*.[qkv] (colwise) has 12 outputs, and 12 / 5 is 2.4" in faults(gpt(), 5)
    assert "_Block has 6 heads (num_heads), which cannot be divided among 4 processes" in faults(gpt(), 4)


def test_fused_projections_are_refused_unless_their_outputs_are_ordered_by_head() -> None:
    assert "qkv (colwise) has 24 outputs of 8 inputs" in faults(Fused(), 2)
    plan = {"qkv": "colwise_by_head", "out": "rowwise"}
    assert check_plan(Fused(), plan, 2) == plan


def test_tied_weights_must_be_cut_alike() -> None:
    plan = {"token_embedding": "embedding_colwise", "head": "colwise_loss"}
    message = faults(gpt(), 2, plan)
    assert "token_embedding (embedding_colwise), head (colwise_loss) have one tied weight" in message
    assert check_plan(gpt(), {"head": "colwise_loss"}, 2)["token_embedding"] == "embedding_rowwise"
    assert check_plan(gpt(), {"token_embedding": "embedding_rowwise"}, 2)["head"] == "colwise_gather_output"


def test_sequence_parallel_needs_its_words() -> None:
    check_plan(gpt(), tensor_plan(gpt()), 2, sequence_parallel=True)
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert 'styles "sequence_begin" (or "sequence_input") and "norm"' in faults(gpt(), 2, plan, sequence_parallel=True)


def llama(**settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, **settings})
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_a_model_of_transformers_has_its_own_plan() -> None:
    model = llama(tie_word_embeddings=True)
    words = check_plan(model, tensor_plan(model), 2)
    assert words["model.layers.0.self_attn.o_proj"] == "rowwise"
    assert words["lm_head"] == "colwise_gather_output"
    assert words["model.embed_tokens"] == "embedding_rowwise"
    assert "LlamaAttention has 2 heads (num_key_value_heads), which cannot be divided among 4 processes" in faults(
        model, 4
    )


def test_experts_of_transformers_are_divided_by_whole_experts() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    assert check_plan(model, tensor_plan(model), 2)["model.layers.0.mlp.experts"] == "experts"
    assert "experts has 2 experts, which cannot be divided among 4 processes" in faults(model, 4)
    assert "q (experts) needs num_experts" in faults(gpt(), 2, {"blocks.*.q": "experts"})
    model.tp_plan = {"model.layers.*.mlp.gate": "packed_colwise"}
    with pytest.raises(PlanError, match=r"MixtralForCausalLM cuts 'model\.layers\.0\.mlp\.gate' by 'packed_colwise'"):
        tensor_plan(model)


def tiny(kind: str, **own: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 1}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **own})
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def test_latent_attention_shares_its_rotary_key() -> None:
    model = tiny("MiniCPM3", **LATENT)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa"
    assert check_plan(model, tensor_plan(model), 2)[name] == "latent"
    found = faults(model, 2, sequence_parallel=True)
    assert f"{name} (latent) needs the tokens of all processes. Set sequence_parallel=False." in found
    del model.model.layers[0].self_attn.qk_rope_head_dim
    assert "it has 12 outputs, and qk_rope_head_dim is None" in faults(model, 2)


def test_values_of_heads_are_divided_with_the_heads() -> None:
    model = tiny("GraniteSWA")
    assert check_plan(model, tensor_plan(model), 2)["model.layers.0.self_attn"] == "head_parameters"
    found = faults(gpt(), 5, {"blocks.*.q": "head_parameters"})
    assert "blocks.*.q (head_parameters) has weight (12, 12), whose first dimension cannot be divided by 5." in found
    model.model.layers[0].self_attn.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(PlanError, match=r"the part of 'model\.layers\.0\.self_attn\.scale' .* its plan has no word\."):
        tensor_plan(model)


def test_models_that_cannot_be_divided_are_refused_with_the_reason() -> None:
    experts = {"num_local_experts": 2, "interleave_moe_layer_step": 1, "head_dim": 2}
    of_features = tiny("Llama4Text", **experts)
    assert "(experts) needs forward(hidden, top_k_index, top_k_weights); it has Llama4TextExperts." in faults(
        of_features, 2
    )
    longcat = {"expert_ffn_hidden_size": 8, "ffn_hidden_size": 8, "num_hidden_layers": 2, "n_routed_experts": 2}
    zero = tiny("LongcatFlash", **LATENT, **longcat, zero_expert_num=1)
    assert "it has num_experts None, gate_up_proj (3, 16, 8)" in faults(zero, 2)

    class Normed(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.norm = nn.LayerNorm(4)

    model = nn.ModuleDict({"embedding": Normed()})
    assert "embedding (Normed) contains norm.weight, which 'embedding_rowwise' does not cut." in faults(
        model, 2, {"embedding": "embedding_rowwise"}
    )

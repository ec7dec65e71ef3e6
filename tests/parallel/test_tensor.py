"""Tensor parallel on real processes: the numbers of one process, and no silent fault."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from tests.parallel.test_tensor_plan import proposal
from tests.ranks import on_ranks
from trainwright.models import GPTTextGeneration, GPTTextGenerationConfig
from trainwright.parallel.tensor_plan import PlanError, check_plan, tensor_plan

STEPS = 3


def gpt(**settings: Any) -> GPTTextGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
    return GPTTextGeneration(GPTTextGenerationConfig(**{**sizes, **settings}))


def of_transformers(kind: str, **settings: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **settings})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def frozen_routers(kind: str, **settings: Any) -> nn.Module:
    model = of_transformers(kind, moe_intermediate_size=16, **settings)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.gate." not in name)
    return model


_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": 4, "head_dim": 4}
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_SPARSE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_ROUTED = {**_SPARSE, "n_routed_experts": 4, "n_shared_experts": 1}
_TWO_KINDS = ["dense", "sparse"]
# Models with latent attention, and with parameters that have a value for each head.
BY_HEADS: dict[str, dict[str, Any]] = {
    "MiniCPM3": {**_LATENT, "scale_emb": 1, "dim_model_base": 8},
    "DeepseekV2": {**_LATENT, **_ROUTED, "first_k_dense_replace": 1},
    "Glm4MoeLite": {**_LATENT, **_ROUTED},
    "DeepseekV32": {**_INDEXED, **_ROUTED, "first_k_dense_replace": 1},
    "GlmMoeDsa": {**_INDEXED, **_ROUTED, "mlp_layer_types": _TWO_KINDS},
    "AXK2": {**_INDEXED, **_ROUTED},
    "HYV4": {**_INDEXED, **_ROUTED},
    "GraniteSWA": {"sliding_window": 4},
    "GraniteMoeSWA": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MiMoV2Flash": {**_SPARSE, "sliding_window": 4, "n_routed_experts": 4, "v_head_dim": 8},
    "Beam": {**_SPARSE, "sliding_window": 4, "num_experts": 4, "mlp_layer_types": _TWO_KINDS},
}


def by_heads(kind: str) -> nn.Module:
    model = of_transformers(kind, pad_token_id=0, **BY_HEADS[kind])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # some are zero, and so would hide gradients
        parameter.data += torch.randn(parameter.shape, generator=generator) / 10
    return model


GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def without_plan(kind: str) -> nn.Module:
    """A model for which transformers has no plan."""
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    pair = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
    start = {"decoder_start_token_id": 2, "num_layers": 1}
    settings: dict[str, dict[str, Any]] = {
        "BertForMaskedLM": {**size, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "ViTForImageClassification": {**size, "image_size": 8, "patch_size": 4, "num_labels": 2},
        "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 64, "dropout_rate": 0.0, **start},
        "BartForConditionalGeneration": {**pair, **heads, **start},
        "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, **dict.fromkeys(GPT2_DROPOUT, 0.0)},
    }
    name = getattr(transformers, kind)
    model: nn.Module = name(name.config_class(vocab_size=33, num_heads=4, **settings[kind]))
    return model


def bert() -> nn.Module:
    from trainwright.tasks.text_classification.model import BertTextClassification, BertTextClassificationConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertTextClassification(BertTextClassificationConfig(**sizes, id2label=["a", "b"]))


class Gated(nn.Module):
    """A model with a plan of its own, and parameters that no module with a word holds."""

    tensor_plan: Mapping[str, str] = {"up": "colwise", "scale": "head_norm", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(8))
        self.up, self.scale, self.down = nn.Linear(8, 16), Scale(8), nn.Linear(16, 33)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.one_hot(ids % 8, 8).float() + self.shift
        x = self.scale(self.up(x).unflatten(-1, (-1, 8))).flatten(-2)
        out: Tensor = self.down(torch.tanh(x))
        return out


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def batches(length: int = 8, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(33, (4, length), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    from trainwright.parallel.tensor import local_loss

    if type(model).__module__.startswith("transformers"):
        if model.main_input_name == "pixel_values":
            return model(pixel_values=ids.repeat(1, 24).reshape(-1, 3, 8, 8) / 33, labels=ids[:, 0] % 2).loss
        return model(input_ids=ids, labels=ids).loss
    outputs = model(ids)
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs.flatten(0, 1), ids.flatten())
    labels = ids if outputs["logits"].dim() == 3 else ids[:, 0] % 2
    loss: Tensor = local_loss(model.compute_loss(outputs["logits"], labels))  # type: ignore[operator]
    return loss


def train(
    model: nn.Module, *, steps: int = STEPS, accumulation: int = 1, autocast: bool = False, **settings: Any
) -> list[float]:
    """The losses and gradient norms of plain torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **settings)
    values = []
    for ids in batches(steps=steps):
        loss = torch.zeros(())
        for part in ids.chunk(accumulation):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                share = loss_of(model, part) / accumulation
            share.backward()  # type: ignore[no-untyped-call]
            loss += share.detach()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.item(), norm.item()]
    return values


def sharded(model: nn.Module, plan: Mapping[str, str] | None = None, **settings: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright.parallel.tensor import shard_tensors
    from trainwright.parallel.tensor_plan import check_plan, tensor_plan

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    is_sequence = settings.get("sequence_parallel", False)
    words = check_plan(model, plan or tensor_plan(model), mesh.size(), sequence_parallel=is_sequence)
    shard_tensors(model, mesh, words, **settings)
    return model


def difference(
    build: Callable[[], nn.Module], settings: Mapping[str, Any], recompute: bool = False, **train_with: Any
) -> float:
    """The largest difference of losses and norms to one process."""
    from torch.distributed.tensor import DTensor

    from trainwright.parallel.recompute import recompute_blocks

    expected = train(build(), **train_with)
    model = build()
    if recompute:
        recompute_blocks(model)
    sharded(model, **settings)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with loss_parallel():
        values = train(model, **train_with)
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


WITHOUT_PLAN = (
    "BertForMaskedLM", "ViTForImageClassification", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "GPT2LMHeadModel",
)  # fmt: skip
# Plans that also divide attention, to the heads of each process.
OWN_PLANS = {
    "GPT2LMHeadModel": {
        "transformer.h.*.attn": "own_heads",
        "transformer.h.*.attn.c_attn": "colwise_fused",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "T5ForConditionalGeneration": {
        "*.block.*.layer.*.*Attention": "own_heads",
        "*.block.*.layer.*.*Attention.[qkv]": "colwise",
        "*.block.*.layer.*.*Attention.relative_attention_bias": "colwise",
        "*.block.*.layer.*.*Attention.o": "rowwise",
    },
}


def with_proposed_plan(kind: str) -> nn.Module:
    """A model with the plan that its refusal shows."""
    model = without_plan(kind)
    model.tensor_plan = proposal(model)[1]  # type: ignore[assignment]
    return model


def with_own_plan(kind: str) -> nn.Module:
    model = without_plan(kind)
    model.tensor_plan = OWN_PLANS[kind]  # type: ignore[assignment]
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "gpt": (gpt, {}, {"steps": 8}),
    "sequence parallel": (gpt, {"sequence_parallel": True}, {}),
    "sequence parallel, recompute": (gpt, {"sequence_parallel": True}, {"recompute": True}),
    "accumulation, fused": (gpt, {}, {"accumulation": 2, "fused": True}),
    "foreach": (gpt, {}, {"foreach": True}),
    "bfloat16": (gpt, {}, {"autocast": True}),
    "bert": (bert, {}, {}),
    "own plan": (Gated, {}, {}),
    "llama, tied": (lambda: of_transformers("Llama", tie_word_embeddings=True), {}, {}),
    "llama, sequence": (lambda: of_transformers("Llama"), {"sequence_parallel": True}, {"steps": 8}),
    "llama, tied, sequence, recompute": (
        lambda: of_transformers("Llama", tie_word_embeddings=True),
        {"sequence_parallel": True},
        {"recompute": True},
    ),
    "qwen3, sequence": (lambda: of_transformers("Qwen3"), {"sequence_parallel": True}, {"accumulation": 2}),
    "mistral, sequence": (lambda: of_transformers("Mistral", sliding_window=4), {"sequence_parallel": True}, {}),
    "qwen2, sequence": (lambda: of_transformers("Qwen2"), {"sequence_parallel": True}, {}),
    "mixtral": (lambda: of_transformers("Mixtral", num_local_experts=4, output_router_logits=True), {}, {"steps": 8}),
    "qwen3 moe, frozen router": (lambda: frozen_routers("Qwen3Moe", num_experts=4, num_experts_per_tok=2), {}, {}),
    **{kind: (partial(by_heads, kind), {}, {}) for kind in BY_HEADS},
    "MiniCPM3, recompute": (partial(by_heads, "MiniCPM3"), {}, {"recompute": True}),
    "HYV4, recompute": (partial(by_heads, "HYV4"), {}, {"recompute": True}),
    "GraniteSWA, sequence": (partial(by_heads, "GraniteSWA"), {"sequence_parallel": True}, {}),
    **{kind: (partial(with_proposed_plan, kind), {}, {}) for kind in WITHOUT_PLAN},
    **{f"{kind}, attention": (partial(with_own_plan, kind), {}, {}) for kind in OWN_PLANS},
}


def differences(names: list[str]) -> dict[str, float]:
    return {name: difference(CASES[name][0], CASES[name][1], **CASES[name][2]) for name in names}


SAMPLED = ["gpt", "sequence parallel, recompute", "accumulation, fused", "bfloat16", "own plan", "llama, tied"]
SAMPLED += [
    "mixtral",
    "GraniteSWA, sequence",
    "HYV4, recompute",
    "llama, tied, sequence, recompute",
    "qwen3, sequence",
    "T5ForConditionalGeneration, attention",
    "GPT2LMHeadModel",
]


@pytest.mark.parametrize("names", [SAMPLED, pytest.param([*CASES], marks=pytest.mark.exhaustive)], ids=len)
def test_two_processes_train_as_one(names: list[str]) -> None:
    pytest.importorskip("transformers")
    for found in on_ranks(differences, names, timeout=120):
        # bfloat16 rounds the parts of a sum.
        assert found.pop("bfloat16") < 5e-2
        assert max(found.values()) < 1e-5, found


@pytest.mark.exhaustive
def test_four_processes_train_as_one() -> None:
    names = ["gpt", "sequence parallel", "DeepseekV2", "HYV4"]
    for found in on_ranks(differences, names, world_size=4, timeout=120):
        assert max(found.values()) < 1e-5, found


def test_sequence_parallel_knows_the_blocks_of_transformers() -> None:
    pytest.importorskip("transformers")
    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        model = of_transformers(kind)
        words = check_plan(model, tensor_plan(model), 2, sequence_parallel=True)
        assert words["model.layers.0"] == "sequence_input"
        norms = {name for name, word in words.items() if word == "norm"}
        assert norms == {name for name, _ in model.named_modules() if name.endswith("norm") and "self_attn" not in name}
    mixed = of_transformers("Glm4Moe", **_SPARSE, n_routed_experts=4, first_k_dense_replace=1)  # one dense, one not
    for model in (of_transformers("Mixtral"), of_transformers("Gemma2"), of_transformers("Olmo2"), mixed):
        with pytest.raises(PlanError, match="whose blocks consist of self_attn and a dense mlp, each after a norm"):
            check_plan(model, tensor_plan(model), 2, sequence_parallel=True)


class Unlisted(Gated):
    tensor_plan: Mapping[str, str] = {"up": "colwise", "down": "rowwise"}  # "scale" sees half of the features


class Unnormalized(nn.Module):
    tensor_plan: Mapping[str, str] = {"begin": "sequence_begin", "norm": "norm", "up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.norm = nn.Embedding(33, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 33)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.begin(ids)))
        return out


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def faults() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright.parallel.tensor import check_replicas

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def check(model: nn.Module, seed: int) -> str:
        sharded(model)
        torch.manual_seed(seed)
        with loss_parallel():
            loss_of(model, batches()[0]).backward()  # type: ignore[no-untyped-call]
        return error_of(lambda: check_replicas(model, mesh))

    def penalize(model: nn.Module) -> None:
        with loss_parallel():
            loss = loss_of(model, batches()[0])
            torch.autograd.grad(loss, [next(model.parameters())], create_graph=True)

    sequence = sharded(gpt(), sequence_parallel=True)
    return {
        "equal seeds": check(gpt(hidden_dropout_prob=0.2), 5),
        "other seeds": check(gpt(hidden_dropout_prob=0.2), torch.distributed.get_rank()),
        "own plan": check(Gated(), 5),
        "unlisted": check(Unlisted(), 5),
        "length": error_of(lambda: loss_of(sequence, batches(length=7)[0])),
        "no norm": error_of(lambda: sharded(Unnormalized(), sequence_parallel=True)(batches()[0])),
        "no split loss": error_of(lambda: loss_of(sharded(gpt()), batches()[0])),
        "id": error_of(lambda: sharded(gpt())(token_ids=torch.tensor([[0, 33]]))),
        "penalty": error_of(lambda: penalize(sharded(Gated()))),
        "penalty of scores": error_of(lambda: penalize(sharded(gpt()))),
        "negative id": error_of(lambda: sharded(of_transformers("Llama"))(input_ids=torch.tensor([[0, -1]]))),
    }


def test_faults_that_torch_does_not_report_are_errors() -> None:
    for found in on_ranks(faults):
        assert found["equal seeds"] == found["own plan"] == "no error"
        assert "so that the copies would" in found["other seeds"]
        assert "ConfigError: tensor parallel: every process holds scale.weight (1 parameters)" in found["unlisted"]
        assert "a batch has 7 tokens, which 2 (tensor_parallel_size) does not divide" in found["length"]
        assert "does not come from a module with the style 'norm'" in found["no norm"]
        assert found["no split loss"] != "no error"
        assert "index out of range in self: the ids are 0 to 33, the embedding has 33 rows" in found["id"]
        assert "the ids are -1 to 0" in found["negative id"]
        assert "ConfigError: tensor parallel: create_graph=True asks for gradients of gradients" in found["penalty"]
        assert "ConfigError: tensor parallel: create_graph=True" in found["penalty of scores"]


def accumulated_gradients(split: str) -> list[Any]:
    """The gradients after two backward passes, and in between, of parameters whose gradients are one tensor."""
    from torch.distributed.device_mesh import init_device_mesh

    from trainwright.parallel.tensor import shard_tensors

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a + self.b)

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = One(), One()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a() + self.b())

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight

    model = Held() if split == "one module" else Apart()
    shard_tensors(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {})
    found: list[Any] = []
    for _ in range(2):
        model(torch.full((1, 3), 2.0)).sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([gradient.to_local().tolist() for gradient in gradients])
    return found


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("split", ["one module", "two modules"])
def test_a_gradient_of_two_parameters_is_accumulated_for_each(split: str) -> None:
    once, twice = [[2.0] * 3] * 2, [[4.0] * 3] * 2
    assert on_ranks(accumulated_gradients, split) == [[once, twice]] * 2

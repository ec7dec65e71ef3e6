"""Adapters of the peft library around a model that is spread over processes; recognized without importing it.

A LoRA layer adds ``B(A(x))`` to the output of its ``base_layer``. Tensor-parallel processes divide A and B as they do
that layer: B of divided outputs, A of divided inputs. The other one is complete on each process.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trainwright.base.errors import ConfigError

# Words for A and B, which are no words of a plan.
ADAPTER_COLWISE = "adapter_colwise"
# By the word of the base layer: of A, of B, and of B where each process has a part of the tokens.
_OUTPUTS = ("replicated", ADAPTER_COLWISE, ADAPTER_COLWISE)
_WHOLE = ("replicated", "replicated", "replicated")
_WORDS = {
    "colwise": _OUTPUTS,
    "colwise_by_head": _OUTPUTS,
    "colwise_fused": ("replicated", "colwise_fused", "colwise_fused"),
    "colwise_loss": ("replicated", "colwise_loss", "colwise_loss"),
    "latent": ("replicated", "latent", "latent"),
    "rowwise": ("rowwise", "replicated", "head_norm"),
}


def is_of_peft(module: nn.Module) -> bool:
    """Whether the class of a module is one of peft."""
    return type(module).__module__.startswith("peft.")


def without_adapters(model: nn.Module) -> tuple[nn.Module, str]:
    """The user's model within those of peft, which pass their arguments on, and its name there; "": it is the model."""
    names = list[str]()
    while is_of_peft(model):
        name = next((name for name in ("base_model", "model") if name in dict(model.named_children())), None)
        if name is None:
            break
        model = model.get_submodule(name)
        names.append(name)
    return model, ".".join(names)


def check_adapters(model: nn.Module, setting: str) -> None:
    """Raise if adapters of peft cannot be spread over processes: those that are no LoRA of linear layers."""
    kinds: Any = getattr(model, "peft_config", None) if is_of_peft(model) else None
    for name, config in (kinds or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA":
            raise ConfigError(
                f"{setting}: the adapter {name!r} of peft is of the type {kind}; supported is LoRA (peft.LoraConfig)."
                " ZeRO (zero_stage) and data parallelism take all types."
            )


def adapted_words(
    modules: Mapping[str, nn.Module], words: Mapping[str, str], *, sequence_parallel: bool
) -> tuple[dict[str, str], list[str]]:
    """The words of a plan, with those of adapted modules passed on to their parts, and what cannot be divided."""
    found, faults = dict(words), list[str]()
    of_peft: dict[str, Any] = {name: module for name, module in modules.items() if is_of_peft(module)}
    for name, module in of_peft.items():
        word = found.pop(name, None)
        if hasattr(module, "original_module"):  # a copy of the module that is trained in full
            copies = [f"{name}.original_module", *(f"{name}.modules_to_save.{one}" for one in module.modules_to_save)]
            found.update({copied: word for copied in copies if word is not None})
        elif hasattr(module, "base_layer"):
            faults += _layer_faults(name, module)
            found.update(_words_of_layer(name, module, word, is_part=sequence_parallel))
    return found, faults


def _words_of_layer(name: str, module: Any, word: str | None, *, is_part: bool) -> Iterator[tuple[str, str]]:
    of_a, *of_b = _WORDS.get(word or "", _WHOLE)
    if word is not None:
        yield f"{name}.base_layer", word
    for adapter in module.lora_A if hasattr(module, "lora_A") else ():
        yield f"{name}.lora_dropout.{adapter}", "replicated"
        yield f"{name}.lora_A.{adapter}", of_a
        yield f"{name}.lora_B.{adapter}", of_b[is_part]


def _layer_faults(name: str, module: Any) -> Iterator[str]:
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind != "peft.tuners.lora.layer.Linear":
        yield (
            f"{name} has an adapter {kind}; supported is LoRA of linear layers. Leave the layer out of target_modules,"
            " or use ZeRO."
        )
    elif variants := sorted({type(one).__name__ for one in module.lora_variant.values()}):
        yield f"{name} has a variant of LoRA ({', '.join(variants)}); supported is LoRA without use_dora and the like."

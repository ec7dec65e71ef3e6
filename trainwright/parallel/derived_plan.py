"""A plan for models of transformers that have none, from the names and sizes of their layers, and its check.

The plan is a guess: before the first step the divided model must return what the complete one has returned.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.config.errors import ConfigError
from trainwright.data.batch import tensors
from trainwright.parallel.meta_start import has_meta

HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "nhead")
_QKV = ({"q", "q_proj", "q_lin", "query"}, {"k", "k_proj", "k_lin", "key"}, {"v", "v_proj", "v_lin", "value"})
_OUT = ("o", "o_proj", "out_proj", "out_lin", "c_proj")
_MLP = (  # the layers before an activation, and the one after it
    ("fc1", "fc2"), ("wi", "wo"), ("wi_0 wi_1", "wo"), ("lin1", "lin2"), ("c_fc", "c_proj"),
    ("intermediate.dense", "output.dense"), ("gate_proj up_proj", "down_proj"), ("up_proj", "down_proj"),
)  # fmt: skip


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer of transformers whose weight has the inputs first (GPT-2)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def derived_plan(model: nn.Module) -> dict[str, str]:
    """The words of attention and MLP layers, by patterns; nothing if no attention is recognised."""
    modules = dict(model.named_modules())
    attention, mlp = dict[str, str](), dict[str, str]()
    for name in modules:
        attention |= _attention(name, modules)
        mlp |= _mlp(name, modules)
    words = {**mlp, **attention} if attention else {}
    return {re.sub(r"\.\d+(?=\.)", ".*", name): word for name, word in words.items()}


def _attention(name: str, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The words of an attention module with a number of heads, and of the layers in it; {}: it is no such module."""
    module = modules[name]
    heads = next((getattr(module, key) for key in HEADS if isinstance(getattr(module, key, None), int)), None)
    children = dict(module.named_children())
    qkv = [next((f"{name}.{key}" for key in children if key in names), "") for names in _QKV]
    outs = [*(f"{name}.{key}" for key in _OUT), f"{name.rpartition('.')[0]}.output.dense"]  # the last is BERT's
    out, width = next((key for key in outs if _sizes(modules.get(key))), ""), _sizes(modules.get(qkv[0]))[1:]
    if heads is None or not out:
        return {}
    if "c_attn" in children and _sizes(children["c_attn"]) == (_sizes(modules[out])[0], 3 * _sizes(modules[out])[0]):
        return {name: "own_heads", f"{name}.c_attn": "colwise_fused", out: "rowwise"}
    if not width or any(_sizes(modules.get(key))[1:] != width for key in qkv) or _sizes(modules[out])[:1] != width:
        return {}
    tables = {
        f"{name}.{key}": "colwise" for key, child in children.items() if getattr(child, "embedding_dim", 0) == heads
    }
    return {name: "own_heads", **dict.fromkeys(qkv, "colwise"), out: "rowwise", **tables}


def _mlp(name: str, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    for ups, down in _MLP:
        before, after = [f"{name}.{up}" for up in ups.split()], f"{name}.{down}"
        inner = _sizes(modules.get(after))[:1]
        if inner and all(_sizes(modules.get(up))[1:] == inner for up in before):
            return {**dict.fromkeys(before, "colwise"), after: "rowwise"}
    return {}


def _sizes(module: Any) -> tuple[int, ...]:
    """The inputs and outputs of a linear layer; () for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return tuple(module.weight.shape) if is_transposed(module) else ()


class DerivedCheck:
    """Compares the outputs of a model before and after it was divided by a derived plan.

    Args:
        part: the model of transformers, complete.
    """

    def __init__(self, part: Any) -> None:
        self._part = part
        if has_meta(part):
            raise self._error("needs its weights for a check, so it cannot start on the meta device.")
        self._expected = self._outputs()

    def compare(self) -> None:
        """Raise if the outputs are others now. Every process must call this."""
        found = self._outputs()
        for before, after in zip(self._expected, found, strict=True):
            worst, largest = (after.cpu() - before).abs().max(), before.abs().max()
            if not worst <= largest * max(1e-3, 10 * torch.finfo(before.dtype).eps):  # TF32 rounds by 5e-4
                raise self._error(f"computes other values: they differ by up to {worst:.2g} of {largest:.2g}.")

    @torch.no_grad()
    def _outputs(self) -> list[Tensor]:
        modes = [(module, module.training) for module in self._part.modules()]
        try:
            self._part.eval()
            with torch.backends.cudnn.flags(enabled=False):  # its convolutions round to TF32
                found = self._part(**self._inputs(), output_hidden_states=True, return_dict=True)
        except Exception as error:
            raise self._error(f"could not be checked ({type(error).__name__}: {error}).") from error
        finally:
            for module, is_training in modes:
                module.training = is_training
        return [one.detach().cpu() for one in tensors(dict(found)) if one.is_floating_point() and one.numel()]

    def _inputs(self) -> dict[str, Tensor]:
        config, example = self._part.config, next(self._part.parameters())
        if self._part.main_input_name == "pixel_values":
            size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
            shape = 2, config.num_channels, size, size
            pixels = torch.linspace(-1, 1, 2 * config.num_channels * size * size).reshape(shape)
            return {"pixel_values": pixels.to(example.device, example.dtype)}
        return {name: value.to(example.device) for name, value in self._part.dummy_inputs.items()}

    def _error(self, fault: str) -> ConfigError:
        return ConfigError(
            f"tensor parallel: {type(self._part).__name__} has no plan; with the one that its layers suggest it {fault}"
            " Give it a plan (model.tensor_plan = {...}, see docs/parallel.md), or use ZeRO (zero_stage)."
        )

"""Context parallel: each process holds a part of every sequence, and in attention all of it for some of the heads.

Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"): before ``scaled_dot_product_attention`` the processes exchange parts
of the sequence for heads, and back after it. torch's ring attention has no kernel for CPUs.

B batch, N heads, L tokens, H features of a head.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.base.errors import ConfigError
from trainwright.base.signatures import read_signature
from trainwright.parallel.adapters import without_adapters
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.recompute import repeated_blocks, replace_forward
from trainwright.parallel.simulated import simulation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

POSITIONS = "position_ids"  # of a rank's tokens in their sequence
SHIFTED = "shift_labels"  # the label of the token after each; -100: none. The names of transformers' models.

_SLIDING, _ORIGINAL = "sliding_attention", "original_max_position_embeddings"  # names of transformers' configs


def split_attention(model: nn.Module, mesh: Mesh, *, compiles_blocks: bool = False) -> None:
    """Let the blocks of ``model`` attend to complete sequences where a batch has a part of each, in place.

    These are batches of the training with ``position_ids``; others are computed as before. The model gets those of its
    own tokens. If they are (B, ranks, L), those of all ranks, texts are packed, and do not attend to each other.

    Raises:
        ConfigError: the model cannot be trained so.
    """
    assert mesh.context_mesh is not None, "called for several context ranks"
    _check_model(model, mesh, compiles_blocks=compiles_blocks)
    attention, name = _OverHeads(mesh.context_mesh), type(model).__name__

    def begin(model: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        attention.was_on, attention.num_calls = attention.is_on, 0
        positions = named.get(POSITIONS) if model.training else None
        attention.is_on, attention.is_packed, attention.mask = positions is not None, False, None
        if positions is None or positions.dim() == 2:
            return arguments, named
        attention.is_packed = True
        attention.mask = mask_of_texts(positions.flatten(1))
        return arguments, {**named, POSITIONS: positions[:, mesh.context_rank]}

    def end(model: nn.Module, *_: Any) -> None:
        if attention.is_on and not attention.num_calls:
            raise ConfigError(
                f"context_parallel_size: the repeated blocks of {name} do not call torch's"
                " scaled_dot_product_attention. Call it there, or build a model of transformers with"
                " attn_implementation='sdpa'."
            )
        if not model.training:  # the backward pass of a batch before may compute its blocks again
            attention.is_on = attention.was_on

    for block in repeated_blocks(model):
        # A layer of transformers recomputes what is within its forward, so the attention is replaced there.
        for part in block.children() if hasattr(block, "gradient_checkpointing") else [block]:
            replace_forward(part, functools.partial(_attending, attention))
    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end)


def _attending(attention: "_OverHeads", forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not attention.is_on:
            return forward(self, *args, **named)
        with attention:
            return forward(self, *args, **named)

    return call


def mask_of_texts(position_ids: Tensor) -> Tensor | None:
    """The tokens that each token of packed texts attends to: those up to itself, of its text; None: one text in a row.

    A text begins where a position is not that of the token before plus 1.

    Args:
        position_ids: (B, L).

    Returns:
        bool (B, 1, L, L), true where the token of the last dimension is seen.
    """
    texts_BL = (position_ids.diff(dim=1) != 1).cumsum(1)
    if simulation() is not None:
        return None  # there are no values
    if not torch.compiler.is_compiling() and not bool(texts_BL[:, -1:].any()):
        return None
    texts_BL = F.pad(texts_BL, (1, 0))
    length = texts_BL.shape[1]
    is_before = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return (texts_BL[:, None, :, None] == texts_BL[:, None, None, :]) & is_before


class _OverHeads(TorchFunctionMode):
    """Computes attention of parts of sequences over complete ones.

    Attributes:
        is_packed: whether it has packed texts. ``mask``: theirs, over complete sequences, in place of the model's own.
        is_on: whether the latest batch has parts of sequences; of a training, while none is evaluated.
        was_on: the same, before the latest forward pass.
        num_calls: calls of ``scaled_dot_product_attention`` for it.
    """

    def __init__(self, mesh: "DeviceMesh") -> None:
        super().__init__()
        self._mesh, self.is_on, self.was_on, self.num_calls = mesh, False, False, 0
        self.is_packed = False
        self.mask: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, q_BNLH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **settings: Any,
    ) -> Tensor:  # fmt: skip
        heads, size = q_BNLH.shape[1], self._mesh.size()
        if not self.is_packed and (attn_mask is not None or not is_causal):
            raise ConfigError(
                "context_parallel_size: the model's attention has a mask, or is not causal; parts of sequences need"
                " scaled_dot_product_attention(..., is_causal=True), without sliding windows."
            )
        if heads % size:
            raise ConfigError(
                f"context_parallel_size: got {size}, which does not divide the {heads} attention heads of a process."
            )
        if k_BNLH.shape[1] % size:  # fewer heads of keys and values than processes
            k_BNLH, v_BNLH = (one.repeat_interleave(heads // one.shape[1], 1) for one in (k_BNLH, v_BNLH))
        q_BNLH, k_BNLH, v_BNLH = (self._exchanged(one, 2, 1) for one in (q_BNLH, k_BNLH, v_BNLH))
        y_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, attn_mask=self.mask, dropout_p=dropout_p, is_causal=self.mask is None, **settings
        )
        return self._exchanged(y_BNLH, 1, 2)

    def _exchanged(self, tensor: Tensor, divided: int, to_divide: int) -> Tensor:
        """The tensor that is divided along another dimension: an all-to-all, in the backward pass too."""
        from torch.distributed import _functional_collectives as collectives

        # Not DTensor's redistribution, which gathers complete tensors on the CPU, and whose results are not kept by a
        # selective recomputation.
        sizes = [1] * self._mesh.size()
        parts = torch.stack(tensor.chunk(len(sizes), to_divide))  # by the process that gets them
        moved = collectives.all_to_all_single_autograd(parts, sizes, sizes, self._mesh.get_group())
        return torch.cat([*moved.unbind()], divided)


def longest_texts(model: nn.Module) -> dict[str, int]:
    """Settings of a model's config by which it computes longer texts otherwise than their parts, if at all."""
    config: Any = getattr(model, "config", None)
    names = ["max_position_embeddings", "attention_chunk_size"]
    if _SLIDING in (getattr(config, "layer_types", None) or [_SLIDING]):
        names.append("sliding_window")
    found = {name: getattr(config, name, None) for name in names}
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # of the layers of each type
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope":
            found[_ORIGINAL] = one.get(_ORIGINAL) or getattr(config, _ORIGINAL, None)
    return {name: length for name, length in found.items() if isinstance(length, int)}


def mixing_layers(model: nn.Module) -> list[str]:
    """The kinds of layers that combine the tokens of a row otherwise than by attention."""
    declared = getattr(getattr(model, "config", None), "layer_types", None) or ()
    kinds = {*declared} - {"full_attention", _SLIDING, "chunked_attention"}
    kinds |= {type(module).__name__ for module in model.modules() if isinstance(module, nn.Conv1d | nn.RNNBase)}
    return sorted(kinds)


def _check_model(model: nn.Module, mesh: Mesh, *, compiles_blocks: bool) -> None:
    """Raise if a model cannot be trained on parts of sequences, by its methods and its config."""
    model, _ = without_adapters(model)
    name, config, faults = type(model).__name__, getattr(model, "config", None), []
    size, heads = mesh.layout.context, getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % (size * mesh.layout.tensor):
        of_tensor = f" x tensor_parallel_size={mesh.layout.tensor}" if mesh.layout.tensor > 1 else ""
        faults.append(f"got {size}{of_tensor}, which does not divide the {heads} attention heads of {name}.")
    is_of_transformers = name.endswith("ForCausalLM") and hasattr(config, "model_type")
    takes_shifted = _takes(model.forward, SHIFTED) or _takes(getattr(model, "compute_loss", None), SHIFTED)
    if not (_takes(model.forward, POSITIONS) and (is_of_transformers or takes_shifted)):
        faults.append(
            f"{name} needs parameters {POSITIONS!r} of forward, and {SHIFTED!r} of forward or compute_loss: the places"
            " of a process's tokens, and the labels of the tokens after them. Models of transformers for causal"
            " language modeling, and GPTTextGeneration, have them."
        )
    if kinds := mixing_layers(model):
        faults.append(f"{name} has layers that combine tokens otherwise than by attention: {', '.join(kinds)}.")
    if compiles_blocks:
        faults.append("compile_blocks cannot compile attention that exchanges heads; set it to False.")
    if faults:
        raise ConfigError("\n".join(f"context_parallel_size: {fault}" for fault in faults))


def _takes(function: Any, name: str) -> bool:
    return function is not None and name in read_signature(function).parameters

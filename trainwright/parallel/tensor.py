"""Tensor parallel: each process holds a part of each layer, as a plan says, by torch's tensor-parallel styles.

All parameters become DTensors, also those that every process holds: gradient norms and optimizers take no mixture.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trainwright.base.errors import ConfigError
from trainwright.parallel.adapters import ADAPTER_COLWISE
from trainwright.parallel.pipeline_cut import Absent
from trainwright.parallel.recompute import replace_forward
from trainwright.parallel.tensor_plan import CUTS, HEADS, is_transposed, rotary_size, tied_names

_PART_OF_TOKENS = Shard(1)  # of (B, L, D)

# The words of modules whose output another module of the plan takes; gradients of gradients are found there.
_KEEP_APART = frozenset(
    {"colwise", "colwise_by_head", "latent", "replicated", "norm", "head_norm", "sequence_begin", "sequence_input"}
)


def shard_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    words: Mapping[str, str],
    *,
    sequence_parallel: bool = False,
    splits_scores: bool = True,
) -> None:
    """Keep this process's part of the model, in place; the values of its parameters are those before.

    Args:
        mesh: the dimension of the tensor-parallel processes.
        words: the styles of modules by name, from :func:`~trainwright.parallel.tensor_plan.check_plan`. Modules of
            other pipeline stages are left out.
        sequence_parallel: between the layers each process has a part of the tokens.
        splits_scores: scores with the word "colwise_loss" stay apart in training, and cross-entropy needs torch's
            ``loss_parallel``; False: they are gathered.
    """
    ties = tied_names(model)
    modules, styles = dict(model.named_modules()), _styles(sequence_parallel, mesh.size())
    if not splits_scores:
        styles["colwise_loss"] = styles["colwise_gather_output"]
    for name, word in words.items():
        if isinstance(modules.get(name), Absent | None):
            continue
        make, change = styles[word]
        style = Transposed(make()) if word in CUTS and is_transposed(modules[name]) else make()
        parallelize_module(modules[name], mesh, style, src_data_rank=None)
        if change is not None:
            change(modules[name])
        if word == "latent":
            _share_rotary_key(modules[name], mesh, rotary_size(modules, name))
        if word not in _KEEP_APART:
            refuse_second_order(modules[name], "tensor")
    replicated = {modules[name] for name, word in words.items() if word == "replicated" and name in modules}
    _replicate_others(model, mesh, replicated)
    for first, *others in ties:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    if splits_scores and "colwise_loss" in words.values():
        model.register_forward_hook(_with_local_losses)


def _replicate_others(model: nn.Module, mesh: DeviceMesh, replicated: set[nn.Module]) -> None:
    """Make the other parameters DTensors that every process holds, and let modules use those of their children.

    ``replicated``: the modules whose parameters are that already.
    """
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            parallelize_module(module, mesh, Replicated(), src_data_rank=None)
            replicated.add(module)
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            _let_use_parameters(module, [child for child in module.children() if child in replicated])


def _styles(
    sequence_parallel: bool, size: int
) -> dict[str, tuple[Callable[[], ParallelStyle], Callable[[nn.Module], object] | None]]:
    """For each word the style, and what else is changed in a module."""
    tokens: Placement = _PART_OF_TOKENS if sequence_parallel else Replicate()
    colwise = ColwiseParallel, _refuse_parts if sequence_parallel else None
    return {
        "colwise": colwise,
        "colwise_by_head": colwise,
        ADAPTER_COLWISE: (ColwiseParallel, None),
        "colwise_fused": (partial(ColwiseParallel, output_layouts=Replicate(), use_local_output=False), _keep_heads),
        "own_heads": (Replicated, partial(_count_heads, size=size)),
        "head_parameters": (HeadParameters, None),
        "latent": (Replicated, None),
        "colwise_gather_output": (partial(ColwiseParallel, output_layouts=Replicate()), _copy_output),
        "colwise_loss": (partial(ColwiseParallel, use_local_output=False), _gather_in_evaluation),
        "rowwise": (partial(RowwiseParallel, output_layouts=tokens), None),
        "rowwise_split_input": (partial(RowwiseParallel, input_layouts=Replicate()), None),
        "embedding_rowwise": (partial(RowwiseParallel, input_layouts=Replicate()), _complete_embedding),
        "embedding_colwise": (partial(ColwiseParallel, output_layouts=Replicate()), None),
        "replicated": (Replicated, None),
        "norm": (partial(Replicated, output=tokens, sums_gradients=sequence_parallel), None),
        "head_norm": (partial(Replicated, sums_gradients=True), None),
        "sequence_begin": (Split if sequence_parallel else Replicated, None),
        "sequence_input": (partial(Split, of_input=True) if sequence_parallel else Replicated, None),
        "experts": (Experts, None),
    }


def _copy_output(module: nn.Module) -> None:
    """Return an output that may be changed in place: torch's FSDP expects no views among a model's outputs."""
    module.register_forward_hook(lambda module, inputs, output: output.clone())


def _keep_heads(module: nn.Module) -> None:
    """Keep of all q, k and v those of the heads of this process."""

    def keep(module: nn.Module, inputs: Any, output: DTensor) -> Tensor:
        mesh = output.device_mesh
        whole: Tensor = output.to_local(grad_placements=[Partial()])
        return torch.unflatten(whole, -1, (3, mesh.size(), -1))[..., mesh.get_local_rank(), :].flatten(-2)

    module.register_forward_hook(keep)


def _count_heads(module: Any, size: int) -> None:
    """Let an attention module have the number of heads of one of ``size`` processes."""
    for name in (*HEADS, "split_size"):  # the width of q in GPT-2
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) // size)


def _share_rotary_key(module: nn.Module, mesh: DeviceMesh, size: int | None) -> None:
    """Sum the gradients of the last ``size`` outputs, which each process uses for its heads only.

    The other outputs go to a colwise module, which sums their gradients.
    """

    def share(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        latent, rotary_key = torch.tensor_split(output, [output.shape[-1] - (size or 0)], -1)
        return torch.cat([latent, _used_in_part(rotary_key, mesh)], -1)

    module.register_forward_hook(share)


def _gather_in_evaluation(module: nn.Module) -> None:
    """Scores of classes stay apart in training only."""
    module.register_forward_hook(lambda module, _, scores: scores if module.training else scores.full_tensor())


def _complete_embedding(module: nn.Module) -> None:
    """Refuse ids outside the vocabulary, and compute gradients in the layout of the weight, not those of all rows.

    Torch's style takes such an id for one of another process, so that all processes would use a zero vector. Each batch
    is checked on the CPU; on an accelerator, where reading ids waits for the device, only the first.
    """
    is_checked = False

    def check(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal is_checked
        ids = inputs[0].to_local() if isinstance(inputs[0], DTensor) else inputs[0]
        if is_checked or type(ids) is not Tensor or not ids.numel():  # in an estimate there are no numbers
            return
        is_checked = ids.device.type != "cpu"
        number: Any = module.num_embeddings
        low, high = (int(value) for value in torch.aminmax(ids))
        if low < 0 or high >= number:
            raise IndexError(
                f"index out of range in self: the ids are {low} to {high}, the embedding has {number} rows"
            )

    module.register_forward_pre_hook(check, prepend=True)  # before torch makes a DTensor of the input
    replace_during_forward(module, ["weight"], lambda weight: (weight.redistribute(placements=weight.placements),))


def _refuse_parts(module: nn.Module) -> None:
    """Refuse the tokens of one process: all are needed."""
    module.register_forward_pre_hook(_refuse_part, prepend=True)  # before torch makes a DTensor of the input


class Transposed(ParallelStyle):
    """A style of torch's for linear layers whose weight has the inputs first."""

    def __init__(self, style: Any) -> None:
        self._style, self._dim = style, int(isinstance(style, ColwiseParallel))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, dim = self._style, self._dim
        bias, needed = (Shard(0), Replicate()) if dim else (Replicate(), Shard(-1))
        distribute_parameters(module, device_mesh, lambda parameter: bias if parameter.dim() == 1 else Shard(dim))

        def begin(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            given = DTensor.from_local(inputs[0], device_mesh, style.input_layouts, run_check=False)
            return given.redistribute(placements=[needed])

        def end(module: nn.Module, inputs: Any, output: Any) -> Any:
            output = output.redistribute(placements=style.output_layouts)
            return output.to_local() if style.use_local_output else output

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
        return module


class Replicated(ParallelStyle):
    """Every process computes the module with the same parameters.

    They are DTensors; the module computes with their local values, so it may do anything with them.

    Args:
        output: the layout of the output, which then is gathered and a DTensor for all that use it; None: it stays as
            it is.
        sums_gradients: the processes have different inputs, so that each has a part of the gradients.
    """

    def __init__(self, *, output: Placement | None = None, sums_gradients: bool = False) -> None:
        self._output, self._sums = output, sums_gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # torch's name for what a style does
        names = distribute_parameters(module, device_mesh, lambda _: Replicate())

        def local_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not any(isinstance(value, DTensor) for value in inputs):
                return None
            return tuple(value.to_local() if isinstance(value, DTensor) else value for value in inputs)

        module.register_forward_pre_hook(local_inputs)
        if self._output is not None:
            module.register_forward_hook(partial(_gather, device_mesh, self._output))
        if names:
            replace_during_forward(module, names, _sum_gradients if self._sums else _local_values)
        return module


class HeadParameters(ParallelStyle):
    """Of the parameters of a module itself, each process has the values of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = distribute_parameters(module, device_mesh, lambda _: Shard(0))
        if names:  # in some models only some layers have them
            replace_during_forward(module, names, _local_values)
        return module


class Experts(ParallelStyle):
    """Each process has some experts and all tokens, and computes those routed to its own; the results are added up."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        own = module.num_experts // device_mesh.size()
        first = own * device_mesh.get_local_rank()
        replace_during_forward(module, distribute_parameters(module, device_mesh, lambda _: Shard(0)), _local_values)
        module.num_experts = own
        if hasattr(module, "_is_expert_parallel"):  # transformers' kernels then skip the index num_experts
            module._is_expert_parallel = True

        def route(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights = inputs
            index = index - first
            is_other = (index < 0) | (index >= own)
            weights = _used_in_part(weights, device_mesh).masked_fill(is_other, 0)
            return _used_in_part(hidden, device_mesh), index.masked_fill(is_other, own), weights

        def add_up(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            whole: Tensor = _gather(device_mesh, Partial(), module, inputs, output).to_local()
            return whole

        module.register_forward_pre_hook(route)
        module.register_forward_hook(add_up)
        return module


def _used_in_part(value: Any, mesh: DeviceMesh) -> Tensor:
    """A tensor that all processes have, of which each computes a part of the gradient."""
    whole = value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    local: Tensor = whole.to_local(grad_placements=[Partial()])
    return local


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, layout_of: Callable[[Tensor], Placement]) -> list[str]:
    """Make the parameters of a module itself DTensors; returns their names."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    for name in names:
        whole = module.get_parameter(name)
        value = distribute_tensor(whole.detach(), mesh, [layout_of(whole)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(value, requires_grad=whole.requires_grad))
    return names


def _gather(mesh: DeviceMesh, layout: Placement, module: nn.Module, inputs: Any, output: Any) -> Any:
    if not isinstance(output, Tensor):
        return output
    parts = DTensor.from_local(output, mesh, [layout], run_check=False)
    return parts if layout == Replicate() else parts.redistribute(placements=[Replicate()])


def _local_values(*parameters: Any) -> tuple[Tensor, ...]:
    """The values that each process holds; their gradients are DTensors again.

    The gradients are copied: autograd passes one tensor to both terms of ``a + b``, and sees only the DTensors around
    it, so that both parameters would add later gradients to the same memory.
    """
    copied: Any = _CopiedGradient  # torch does not declare the types of apply
    return tuple(copied.apply(parameter.to_local()) for parameter in parameters)


class _CopiedGradient(torch.autograd.Function):
    """The same values, whose gradient is a copy. A hook of a tensor would do that, too, but not in a compiled block."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept for the backward pass."""

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def _sum_gradients(*parameters: Any) -> tuple[Tensor, ...]:
    """The local values; the gradients of the processes are added at once, and have the layout of the parameters."""
    whole = [parameter.redistribute(placements=[Replicate()]) for parameter in parameters]
    return tuple(parameter.to_local(grad_placements=[Partial()]) for parameter in whole)


def replace_during_forward(module: nn.Module, names: list[str], values_of: Callable[..., tuple[Tensor, ...]]) -> None:
    """Let the forward pass of ``module`` use ``values_of`` its parameters, also where a backward pass repeats it."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def compute(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            own = vars(module)
            if names[0] in own:  # the module that contains this one has replaced them
                return forward(module, *arguments, **named)
            own.update(zip(names, values_of(*[getattr(module, name) for name in names]), strict=True))
            try:
                return forward(module, *arguments, **named)
            finally:
                for name in names:
                    own.pop(name, None)

        return compute

    replace_forward(module, wrap)


def _let_use_parameters(module: nn.Module, children: list[nn.Module]) -> None:
    """Let the forward pass of ``module`` use the parameters of replicated ``children``, not only call them.

    A mixer of a hybrid model, for example, computes with the weights of its convolution.
    """
    names_of = {child: [name for name, _ in child.named_parameters(recurse=False)] for child in children}

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def compute(module: nn.Module, *arguments: Any, **named: Any) -> Any:
            lent = list[nn.Module]()
            try:
                for child, names in names_of.items():
                    parameters: list[Any] = [getattr(child, name) for name in names]
                    # Those that ZeRO gathers in a unit of their own are complete in the child's own forward pass.
                    if all(isinstance(one, DTensor) and one.device_mesh.ndim == 1 for one in parameters):
                        vars(child).update(zip(names, _local_values(*parameters), strict=True))
                        lent.append(child)
                return forward(module, *arguments, **named)
            finally:
                for child in lent:
                    for name in names_of[child]:
                        vars(child).pop(name, None)

        return compute

    if any(names_of.values()):
        replace_forward(module, wrap)


class Split(ParallelStyle):
    """From the output of the module on (``of_input``: its first input), each process has a part of the tokens."""

    def __init__(self, *, of_input: bool = False) -> None:
        self._of_input = of_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()

        def split(output: Tensor) -> Tensor:
            if output.shape[1] % size:  # torch would end the process
                raise ConfigError(
                    f"sequence parallel: a batch has {output.shape[1]} tokens, which {size} (tensor_parallel_size) does"
                    f" not divide. Pad texts to a multiple of {size}, or set sequence_parallel=False."
                )
            whole = DTensor.from_local(output, device_mesh, [Replicate()], run_check=False)
            part: Tensor = whole.redistribute(placements=[_PART_OF_TOKENS]).to_local()
            return part

        if self._of_input:
            module.register_forward_pre_hook(lambda module, inputs: (split(inputs[0]), *inputs[1:]))
        else:
            module.register_forward_hook(lambda module, inputs, output: split(output))
        return module


def _refuse_part(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not isinstance(inputs[0], DTensor):
        raise ConfigError(
            f"sequence parallel: the input of a colwise {module} does not come from a module with the style 'norm',"
            " which gathers the tokens of all processes. Give the style to the module before it."
        )


def refuse_second_order(module: nn.Module, kind: str) -> None:
    """Refuse gradients of the gradients that pass ``module``; ``kind``: of the parallelism that exchanges them."""

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{kind} parallel: create_graph=True asks for gradients of gradients (for a gradient penalty, for"
                " example), which torch computes without the exchanges between the processes, so they would be wrong."
                f" Use data parallelism ({kind}_parallel_size=1, without ZeRO)."
            )

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(check)  # type: ignore[no-untyped-call]

    module.register_forward_hook(watch)


def with_local_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which computes a loss from scores that stay apart, with a loss that is a tensor of this process."""

    @wraps(function)
    def compute_loss(*arguments: Any, **named: Any) -> Any:
        return local_loss(function(*arguments, **named))

    return compute_loss


def local_loss(loss: Any) -> Any:
    """The value of a loss that is a DTensor, as a tensor of this process."""
    # A copy: torch's FSDP expects no views among the outputs of a model.
    return loss.full_tensor().clone() if isinstance(loss, DTensor) and not loss.dim() else loss


def check_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare the gradients of the parameters that every process holds; each must have computed the same ones.

    They differ if the processes draw different random numbers, or if a module sees a part of the features or tokens and
    its word does not say so: then the parameters would drift apart. Every process of ``mesh`` must call this.

    Raises:
        ConfigError: some differ by more than rounding.
    """
    names, parts = [], []
    for name, parameter in model.named_parameters():
        if is_whole(parameter) and parameter.grad is not None:
            gradient = parameter.grad.to_local().double()  # type: ignore[attr-defined]
            names.append(name)
            parts.append(torch.stack([gradient.sum(), gradient.abs().sum()]))
    if not parts:
        return
    own = torch.stack(parts)
    first = own.clone()
    group = mesh.get_group()
    torch.distributed.broadcast(first, torch.distributed.get_global_rank(group, 0), group)
    differs = ((own - first).abs() > 1e-3 * first[:, 1:]).any(dim=1).float()
    torch.distributed.all_reduce(differs, group=group)
    found = [name for name, count in zip(names, differs.tolist(), strict=True) if count]
    if found:
        raise ConfigError(
            f"tensor parallel: every process holds {', '.join(found[:5])} ({len(found)} parameters), but the gradients"
            " differ between the processes, so that the copies would. A module between colwise and rowwise"
            " modules needs the style 'head_norm' in the plan, one that has a part of the tokens (sequence parallel)"
            " the style 'norm'. Random numbers must be the same on these processes: seed them with the data rank."
        )


def is_whole(parameter: Any) -> bool:
    """Whether each tensor-parallel process holds the parameter, perhaps a share of it that belongs to a data rank."""
    return isinstance(parameter, DTensor) and parameter.placements[-1] == Replicate()  # "tp" is the last dimension


def _with_local_losses(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {name: local_loss(value) for name, value in outputs.items()} if type(outputs) is dict else outputs
    if isinstance(outputs, tuple) and type(outputs) is tuple:
        return tuple(map(local_loss, outputs))
    return local_loss(outputs)

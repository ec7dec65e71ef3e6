"""Which part of a model each tensor-parallel process holds: a plan with a word for the modules of a pattern.

A model declares it as ``tensor_plan``; models of transformers may have theirs, ``tp_plan``. Modules without a word are
computed by every process. In a pattern ``*`` stands for any name between two dots.

>>> plan = {
...     "token_embedding": "embedding_rowwise",
...     "blocks.*.norm1": "norm",
...     "blocks.*.q": "colwise",
...     "blocks.*.projection": "rowwise",
... }
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from trainwright.base.errors import ConfigError, did_you_mean
from trainwright.base.signatures import read_signature
from trainwright.parallel.adapters import adapted_words, is_of_peft, without_adapters

logger = logging.getLogger("trainwright.parallel")

# The attributes in which attention modules hold their number of heads.
HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "nhead")

# The dimension of a weight that a word cuts, of nn.Linear and of nn.Embedding; None: the module cannot have the word.
CUTS: dict[str, tuple[int | None, int | None]] = {
    "colwise": (0, 1),  # a part of the outputs, which stay apart: the input of a "rowwise" module
    "colwise_by_head": (0, None),  # the same, of fused projections whose outputs are ordered by head
    "colwise_fused": (0, None),  # the same, of projections to all q, then all k, then all v
    "colwise_gather_output": (0, None),  # the whole output on every process
    "colwise_loss": (0, None),  # scores that stay apart in training: cross-entropy adds up the parts
    "rowwise": (1, None),  # of the parts of a "colwise" module: the whole output on every process
    "rowwise_split_input": (1, None),  # of a whole input
    "embedding_rowwise": (None, 0),  # a part of the vocabulary
    "embedding_colwise": (None, 1),  # a part of the features
}
# A module forward(hidden, top_k_index, top_k_weights): each process has some of its num_experts experts.
EXPERTS = "experts"
WHOLE = {
    "replicated": "every process computes the module",
    "norm": "the same; its output is the input of several colwise modules, and their gradients are summed once",
    "head_norm": "a norm of each head's features, between colwise and rowwise modules",
    "own_heads": "an attention module: its number of heads becomes that of the process",
    "head_parameters": "an attention module: of its own parameters each process has the values of its heads",
    "latent": "a linear layer to latent keys and values, and to the rotary key of all heads (qk_rope_head_dim)",
    "sequence_begin": "with sequence parallel, from its output on each process has a part of the tokens, up to a norm",
    "sequence_input": "the same, from its input on: the first block",
}
WORDS = [*CUTS, *WHOLE, EXPERTS]
# The words of transformers that are other words here.
TRANSFORMERS_WORDS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "replicate": "replicated",
    "replicated_with_grad_allreduce": "head_norm",
    "local_params": "head_parameters",
    "mla_kv_a_proj": "latent",
}
_FUSED = re.compile(r"(^|_)(w?qkv|kqv|c_attn|in_proj|query_key_value|gate_up)(_|$)", re.IGNORECASE)


class PlanError(ConfigError):
    """The model has no plan for tensor parallelism, or one that does not fit."""


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The plan of the model: its ``tensor_plan``, or the ``tp_plan`` of a transformers model.

    Each part of a model may have its own.

    Raises:
        PlanError: there is none; shows one to write.
    """
    plan = {
        prefix + pattern: word for prefix, words in _plans(model, "", _translated) for pattern, word in words.items()
    }
    inner, _ = without_adapters(model)
    if not plan:
        raise PlanError(
            f"tensor parallel: {type(inner).__name__} has no plan that says how its layers are cut."
            f"{_proposal(inner)} Or use ZeRO (stage 1, 2 or 3), which works for every module."
        )
    return plan


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer of transformers whose weight has the inputs first (GPT-2)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _proposal(model: nn.Module) -> str:
    """A plan with each layer that can be cut: it divides the layers around a wider hidden one, and nothing else."""
    modules = dict(model.named_modules())
    layers = dict[str, nn.Module]()
    sizes = dict[str, tuple[int, ...]]()
    for name, module in modules.items():
        if _sizes(module):
            pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
            layers.setdefault(pattern, module)
            # The features of heads are not divided by the layers alone.
            is_of_heads = any(hasattr(modules[name.rpartition(".")[0]], heads) for heads in HEADS)
            sizes.setdefault(pattern, () if is_of_heads else _sizes(module))
    if not layers:
        return " It has no layer that can be cut: nn.Linear and nn.Embedding."
    words, wider = dict.fromkeys(layers, "replicated"), list[str]()  # wider: the layers before that end in a hidden one
    for pattern, module in layers.items():
        if wider and sizes[pattern] == sizes[wider[0]][::-1]:
            words |= {**dict.fromkeys(wider, "colwise"), pattern: "rowwise"}
        others = wider if wider and sizes[pattern] == sizes[wider[0]] else []
        wider = [*others, pattern] if not isinstance(module, nn.Embedding) and _is_wider(sizes[pattern]) else []
    lines = (
        f'    "{name}": "{word}",  # {" -> ".join(map(str, _sizes(layers[name])))}' for name, word in words.items()
    )
    return "\n  ".join(
        [
            " Declare one in its class, or set it. This one divides each pair of layers around a wider hidden one;"
            " replicated layers are complete on every process:",
            "model.tensor_plan = {",
            *lines,
            "}",
            "In attention, q, k and v can be colwise, the output rowwise, and the module that counts heads own_heads"
            " (docs/parallel.md).",
        ]
    )


def _is_wider(sizes: tuple[int, ...]) -> bool:
    return len(sizes) == 2 and sizes[0] < sizes[1] != 3 * sizes[0]  # three times: q, k and v


def _sizes(module: Any) -> tuple[int, ...]:
    """The inputs and outputs of a layer that can be cut; () for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return tuple(module.weight.shape) if is_transposed(module) else ()


def check_plan(
    model: nn.Module, plan: Mapping[str, str], size: int, *, sequence_parallel: bool = False
) -> dict[str, str]:
    """The word of each module with one, by its name. Modules tied to one of them get the word that cuts them alike.

    Raises:
        PlanError: the plan does not fit the model, or its sizes do not divide by ``size``; lists all faults.
    """
    modules, faults = dict(model.named_modules(remove_duplicate=False)), list[str]()  # also of a shared module
    if sequence_parallel:
        plan = {**dict(_sequence_words(model, plan)), **plan}
    words: dict[str, str] = {}
    patterns: dict[str, str] = {}
    for pattern, word in plan.items():
        found = [name for name in modules if _matches(name, pattern)]
        if word not in WORDS:
            faults.append(f"{pattern!r}: there is no style {word!r}. {did_you_mean(word, WORDS)}")
        elif not found:
            faults.append(f"{pattern!r} matches no module. {_near(pattern, modules)}")
        else:
            words.update(dict.fromkeys(found, word))
            patterns.update(dict.fromkeys(found, pattern))
    is_own = not _is_transformers(without_adapters(model)[0])
    faults += _head_faults(modules, words, size)
    words, of_adapters = adapted_words(modules, words, sequence_parallel=sequence_parallel)
    for name, word in words.items():
        if word in WORDS:
            pattern = patterns.get(name, name)
            faults += _module_faults(pattern, modules[name], word, size, is_own=is_own and name in patterns)
    faults += _latent_faults(modules, words, sequence_parallel=sequence_parallel)
    faults += chain(of_adapters, _complete_ties(model, modules, words))
    begins = {"sequence_begin", "sequence_input"} & {*words.values()}
    if sequence_parallel and not (begins and "norm" in words.values()):
        of_transformers = "" if is_own else f" Of transformers, models have them whose {_NORMED_BLOCKS}."
        faults.append(
            'sequence parallel needs modules with the styles "sequence_begin" (or "sequence_input") and "norm" in the'
            f" plan.{of_transformers} Set sequence_parallel=False."
        )
    if faults:
        kind = type(without_adapters(model)[0]).__name__
        where = f"tensor parallel over {size} processes: the plan of {kind} does not fit"
        raise PlanError("\n  ".join([f"{where}:", *dict.fromkeys(faults)]))
    return words


def expert_modules(model: nn.Module, size: int) -> list[str]:
    """The names of the modules whose experts can be divided among ``size`` processes.

    Those that the plan of the model, or of a part of it, says are experts.

    Raises:
        PlanError: there are none, or they do not divide; lists all faults.
    """
    modules, setting = dict(model.named_modules()), "expert_parallel_size"
    plans = [*_plans(model, "", _expert_patterns)]
    patterns = [prefix + pattern for prefix, words in plans for pattern, word in words.items() if word == EXPERTS]
    names = [name for name in modules if any(_matches(name, pattern) for pattern in patterns)]
    kind = type(without_adapters(model)[0]).__name__
    if not names:
        raise PlanError(
            f"{setting}: got {size}, but {kind} has no experts that can be divided: modules with num_experts and"
            " forward(hidden, top_k_index, top_k_weights), whose parameters are stacked by expert. Models of"
            ' transformers declare them (ep_plan); declare yours: tensor_plan = {"blocks.*.experts": "experts"}. Or'
            f" set {setting}=1."
        )
    faults = [fault for name in names for fault in _expert_faults(name, modules[name], size, setting)]
    if faults:
        where = f"{setting}: the experts of {kind} cannot be divided"
        raise PlanError("\n  ".join([f"{where}:", *dict.fromkeys(faults)]))
    return names


def _plans(
    module: nn.Module, prefix: str, translated: Callable[[Any], Iterator[tuple[str, str]]]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The names of the parts of a model that have a plan, each with its plan; ``translated``: of transformers."""
    is_model = not is_of_peft(module)  # which has the attributes of the one within it
    plan: Any = getattr(module, "tensor_plan", None) if is_model else None
    has_foreign = is_model and _is_transformers(module)
    if isinstance(plan, Mapping):
        yield prefix, plan
    elif has_foreign and (getattr(module, "tp_plan", None) or getattr(module, "ep_plan", None)):
        yield prefix, dict(translated(module))
    else:
        for name, child in module.named_children():
            yield from _plans(child, f"{prefix}{name}.", translated)


def _expert_patterns(module: Any) -> Iterator[tuple[str, str]]:
    """The experts in the plans of transformers; some models have only one of the two."""
    for attribute, word in (("ep_plan", "ep_dispatch_experts"), ("tp_plan", "moe_tp_experts")):
        for pattern, foreign in (getattr(module, attribute, None) or {}).items():
            if foreign == word:
                yield pattern, EXPERTS


def _translated(module: Any) -> Iterator[tuple[str, str]]:
    """The plan of transformers in our words; without patterns for parts that this model does not have."""
    names = [name for name, _ in chain(module.named_modules(), module.named_parameters())]
    experts = [pattern for pattern, _ in _expert_patterns(module)]
    of_heads = [*_head_parameter_patterns(module)]
    plan = {
        name: word
        for name, word in (module.tp_plan or {}).items()
        if name not in of_heads and name.rpartition(".")[0] not in experts  # of packed weights
    }
    for pattern, foreign in {**plan, **dict.fromkeys(experts, EXPERTS)}.items():
        word = TRANSFORMERS_WORDS.get(foreign, foreign)
        found = next((name for name in names if _matches(name, pattern)), None)
        if found is None:
            logger.debug("%s: no module matches %r of its tp_plan.", type(module).__name__, pattern)
        elif word not in WORDS:
            raise PlanError(
                f"tensor parallel: {type(module).__name__} cuts {found!r} by {foreign!r}, which is not supported."
                " Use ZeRO (zero_stage), or pipeline parallel."
            )
        else:
            yield pattern, word


def _head_parameter_patterns(model: Any) -> Iterator[str]:
    """The patterns, in the plan of transformers, of parameters that modules with the word local_params use themselves.

    Raises:
        PlanError: such a module has a parameter that the plan does not divide by heads.
    """
    plan: dict[str, str] = model.tp_plan or {}
    owners = [pattern for pattern, foreign in plan.items() if foreign == "local_params"]
    for name, _ in model.named_parameters():
        if any(_matches(name.rpartition(".")[0], owner) for owner in owners):
            words = {pattern: foreign for pattern, foreign in plan.items() if _matches(name, pattern)}
            if [*words.values()] != ["colwise"]:
                found = ", ".join(map(repr, words.values())) or "no word"
                raise PlanError(
                    f"tensor parallel: {type(model).__name__} computes with the part of {name!r} that a process has"
                    f" (local_params), which must be that of its heads (colwise); its plan has {found}. Use ZeRO"
                    " (zero_stage), or pipeline parallel."
                )
            yield from words


# The parts of a block of transformers that adds the results of attention and of dense layers to its input, each after a
# norm of it. All other values of the block have a part of the features or the tokens.
_PARTS_OF_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_LAST_LAYERS = ("self_attn.o_proj", "mlp.down_proj")
_NORMED_BLOCKS = (
    "blocks consist of self_attn and a dense mlp, each after a norm (input_layernorm, post_attention_layernorm), with a"
    " norm behind the last one, as those of Llama, Mistral, Qwen2 and Qwen3"
)


def _sequence_words(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What sequence parallel adds to the plans of transformers, for models with blocks like those of Llama."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        blocks, prefix = getattr(module, "layers", None), f"{name}." if name else ""
        if not (_is_transformers(module) and isinstance(blocks, nn.ModuleList) and hasattr(module, "norm")):
            continue
        parts = {part for block in blocks for part, _ in block.named_children()}
        last = [(f"{prefix}layers.{index}.", layer) for index in range(len(blocks)) for layer in _LAST_LAYERS]
        are_rowwise = [
            place + layer in modules
            and any(_matches(place + layer, at) and word == "rowwise" for at, word in plan.items())
            for place, layer in last
        ]
        if parts == _PARTS_OF_BLOCK and all(are_rowwise):
            yield f"{prefix}layers.0", "sequence_input"
            yield f"{prefix}layers.*.*_layernorm", "norm"
            yield f"{prefix}norm", "norm"


def _is_transformers(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    """What there is where the pattern stops to match."""
    wanted = pattern.split(".")
    for length in range(len(wanted) - 1, -1, -1):
        parents = [name for name in modules if _matches(name, ".".join(wanted[:length]))] if length else [""]
        if parents:
            children = [name for name, _ in modules[parents[0]].named_children()]
            return f"{parents[0] or 'The model'} has no {wanted[length]!r}. {did_you_mean(wanted[length], children)}"
    return ""


def _module_faults(name: str, module: nn.Module, word: str, size: int, *, is_own: bool) -> Iterator[str]:
    if word == "head_parameters":
        yield from _head_parameter_faults(name, module, size)
    if word in WHOLE:
        return
    if word == EXPERTS:
        yield from _expert_faults(name, module, size, "tensor_parallel_size")
        return
    dim = _cut_of(module, word)
    if dim is None:
        kind = "nn.Embedding" if word.startswith("embedding") else "nn.Linear"
        found = type(module).__name__
        found = f"{type(module).__module__}.{found}" if found in kind else found  # the layer of an adapter
        yield f"{name} is a {found}; {word!r} cuts an {kind}."
        return
    inner = [own for own, _ in module.named_parameters() if "." in own]
    if inner:
        yield f"{name} ({type(module).__name__}) contains {inner[0]}, which {word!r} does not cut."
        return
    length = module.get_parameter("weight").shape[dim]
    if word == "colwise_fused" and length % (3 * size):
        yield f"{name} ({word}) has {length} outputs, and {length} / 3 / {size} is not a whole number."
    elif length % size and word not in _MAY_BE_UNEVEN:
        what = "outputs" if dim == 0 else "inputs"
        yield f"{name} ({word}) has {length} {what}, and {length} / {size} is {length / size:g}, not a whole number."
    if is_own and word == "colwise" and isinstance(module, nn.Linear):
        is_triple = module.out_features == 3 * module.in_features
        if _FUSED.search(name.rpartition(".")[2]) or is_triple:
            yield (
                f"{name} (colwise) has {module.out_features} outputs of {module.in_features} inputs, as fused q, k and"
                " v have: a part of them would mix q, k and v of different heads. If its outputs are all q, then all k,"
                " then all v, give it the style 'colwise_fused'; if they are ordered by head, 'colwise_by_head'."
            )


def _head_parameter_faults(name: str, module: nn.Module, size: int) -> Iterator[str]:
    for own, parameter in module.named_parameters(recurse=False):
        if not parameter.dim() or len(parameter) % size:
            shape = tuple(parameter.shape)
            yield f"{name} (head_parameters) has {own} {shape}, whose first dimension cannot be divided by {size}."


def _expert_faults(name: str, module: Any, size: int, setting: str) -> Iterator[str]:
    if is_of_peft(module):
        yield f"{name} has an adapter of peft, which is not divided. Leave experts out of target_parameters."
        return
    number = getattr(module, "num_experts", None)
    shapes = [(own, tuple(parameter.shape)) for own, parameter in module.named_parameters()]
    other = [f"{own} {shape}" for own, shape in shapes if shape[:1] != (number,) or "." in own]
    if not isinstance(number, int) or other or not shapes:
        found = ", ".join([f"num_experts {number}", *other])
        yield f"{name} ({EXPERTS}) needs num_experts, the first dimension of all its parameters; it has {found}."
    elif not _takes_routes(module):
        found = f"{type(module).__name__}.forward{read_signature(module.forward)}"
        yield f"{name} ({EXPERTS}) needs forward(hidden, top_k_index, top_k_weights); it has {found}."
    elif number % size:
        yield (
            f"{name} has {number} experts, which cannot be divided among {size} processes: {setting} must divide"
            f" {number}."
        )


def _latent_faults(
    modules: Mapping[str, nn.Module], words: Mapping[str, str], *, sequence_parallel: bool
) -> Iterator[str]:
    for name in (name for name, word in words.items() if word == "latent"):
        size, width = rotary_size(modules, name), getattr(modules[name], "out_features", 0)
        if size is None or not size <= width:
            yield (
                f"{name} (latent) must be an nn.Linear whose last outputs are the rotary key, as many as the"
                f" qk_rope_head_dim of the module around it; it has {width} outputs, and qk_rope_head_dim is {size}."
            )
        if sequence_parallel:
            yield f"{name} (latent) needs the tokens of all processes. Set sequence_parallel=False."
            return


def rotary_size(modules: Mapping[str, nn.Module], name: str) -> int | None:
    """The features of the rotary key in the outputs of a "latent" module, which the attention around it declares."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        size = getattr(modules.get(owner), "qk_rope_head_dim", None)
        if isinstance(size, int):
            return size
    return None


def _takes_routes(module: Any) -> bool:
    """Whether experts are called with features, the experts of each token and their weights."""
    try:
        read_signature(module.forward).bind("hidden", "top_k_index", "top_k_weights")
    except TypeError:
        return False
    return True


_MAY_BE_UNEVEN = {"colwise_gather_output", "colwise_loss", "embedding_rowwise"}  # a vocabulary


def _head_faults(modules: Mapping[str, nn.Module], words: Mapping[str, str], size: int) -> Iterator[str]:
    """Numbers of heads that do not divide, of the modules that hold the cut ones and of their configs."""
    parents = dict.fromkeys(name.rpartition(".")[0] for name, word in words.items() if word == "colwise")
    for parent in parents:
        module: Any = modules[parent]
        is_attention = "att" in f"{parent}{type(module).__name__}".lower()
        for owner in (module, getattr(module, "config", None) if is_attention else None):
            for attribute in HEADS:
                heads = getattr(owner, attribute, None)
                if isinstance(heads, int) and heads % size:
                    yield (
                        f"{type(module).__name__} has {heads} heads ({attribute}), which cannot be divided among {size}"
                        f" processes: tensor_parallel_size must divide {heads}. ZeRO (zero_stage) has no such limit."
                    )


def _complete_ties(model: nn.Module, modules: Mapping[str, nn.Module], words: dict[str, str]) -> Iterator[str]:
    """Give modules without a word the one that cuts a tied weight alike."""
    for names in tied_names(model):
        owners = [name.rpartition(".")[0] for name in names]
        cuts = {owner: _cut_of(modules[owner], words.get(owner)) for owner in owners}
        dims = {cut for owner, cut in cuts.items() if owner in words}
        for owner in owners:
            if owner not in words and dims == {0}:
                is_embedding = isinstance(modules[owner], nn.Embedding)
                words[owner] = "embedding_rowwise" if is_embedding else "colwise_gather_output"
                cuts[owner] = _cut_of(modules[owner], words[owner])
        if len({*cuts.values()}) > 1:
            by = ", ".join(f"{owner} ({words.get(owner, 'replicated')})" for owner in owners)
            yield f"{by} have one tied weight, which these styles cut differently."


def _cut_of(module: nn.Module, word: str | None) -> int | None:
    """The dimension of the weight that a word cuts; None: it cuts no such module."""
    linear, embedding = CUTS.get(word or "", (None, None))
    if is_transposed(module):
        return None if linear is None else 1 - linear
    return linear if isinstance(module, nn.Linear) else embedding if isinstance(module, nn.Embedding) else None


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]

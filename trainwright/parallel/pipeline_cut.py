"""Cut a model between its layers: which of its modules a pipeline stage holds, and what the stage computes.

A model declares where it can be cut: ``pipeline_layers`` is the name of its ``nn.ModuleList`` of layers, and its
``forward(**batch)`` computes ``before_layers(**batch)``, then ``layer(hidden, *layer_arguments(**batch))`` for each of
them (``layer_arguments`` may be absent), then ``after_layers(hidden, **batch)``. Modules that are assigned before the
layers belong to the first stage, those after them to the last. Models of transformers with a ``pp_plan`` need nothing.

Each stage keeps the names of the complete model: a module of another stage is replaced by a placeholder without
parameters. Every stage has the batch, so masks are computed where they are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.base.batch import arguments as arguments_of
from trainwright.base.batch import parameter_names
from trainwright.base.errors import ConfigError
from trainwright.parallel.adapters import without_adapters
from trainwright.parallel.meta_start import has_meta, shell_of
from trainwright.parallel.simulated import simulation
from trainwright.parallel.tensor_plan import tied_names


class Absent(nn.Module):
    """In the place of a module of another stage.

    Args:
        name: the name of that module.
        original: the module; its attributes that are plain values are kept.
        passes_input: whether a call returns its first argument; otherwise it raises.

    Attributes:
        value: what a call returns in place of its argument; None: the argument.
    """

    value: Any = None

    def __init__(self, name: str, original: nn.Module, *, passes_input: bool) -> None:
        super().__init__()
        plain = {key: value for key, value in vars(original).items() if isinstance(value, str | int | float | None)}
        vars(self).update({key: value for key, value in plain.items() if not key.startswith("_") and key != "training"})
        self._name, self._passes_input = name, passes_input

    def forward(self, hidden: Any = None, *arguments: Any, **named: Any) -> Any:
        if not self._passes_input:
            raise ConfigError(
                f"{self._name} is on another pipeline stage. before_layers may use modules that the model assigns"
                " before its layers, after_layers those that it assigns after them."
            )
        return hidden if self.value is None else self.value


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold: its names on each of them, by the number of the stage."""

    names: Mapping[int, tuple[str, ...]]


class Stage(nn.Module):
    """Some consecutive layers of a model, on the first stage with what precedes and on the last with what follows.

    Called with the hidden states of the previous stage (the first stage ignores its argument) for one micro-batch after
    another of those that ``begin`` receives.

    Args:
        model: the model, in which modules of other stages are absent.
        run: ``run(model, stage, hidden, batch)`` computes the stage.
        index, number: which of how many stages this is.
        layers: the names of its layers.

    Attributes:
        error: raised by the latest micro-batch.
        copies_output: whether what it passes on is a copy, never a view of another tensor.
    """

    copies_output = False

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], index: int, number: int, layers: Sequence[str]
    ) -> None:
        super().__init__()
        self.model, self.index, self.layers = model, index, tuple(layers)
        self.is_first, self.is_last = index == 0, index == number - 1
        self.error: Exception | None = None
        self._run, self._number = run, number
        self._followed: list[tuple[nn.Module, nn.Module]] = []
        self._batches: Sequence[Any] = ()
        self._finish: Callable[[Any, Any], Any] | None = None
        self._position = 0  # of the next micro-batch

    def begin(self, batches: Sequence[Any], finish: Callable[[Any, Any], Any] | None = None) -> None:
        """The next calls are for these micro-batches. ``finish(outputs, batch)``: the result of the last stage."""
        self.error, self._batches, self._finish, self._position = None, batches, finish, 0

    def follow(self, model: nn.Module, names: Sequence[str]) -> None:
        """Train or evaluate as ``model`` does, of which some modules were copied for this stage."""
        # A tuple in a list, so that the model is no submodule.
        self._followed = [(self.model.get_submodule(name), model.get_submodule(name)) for name in names]

    def forward(self, hidden: Tensor) -> Any:
        for copied, original in self._followed:
            copied.training = original.training
        batch = self._batches[self._position]
        self._position += 1
        try:
            result = self._run(self.model, self, hidden, batch)
            if self.is_last:
                return result if self._finish is None else self._finish(result, batch)
            return result.clone() if self.copies_output else result
        except Exception as error:
            error.add_note(f"In {self}, micro-batch {self._position} of {len(self._batches)}.")
            if isinstance(error, AttributeError) and not self.is_first:
                error.add_note("Parameters of the model itself are on the first stage: for before_layers only.")
            if isinstance(error, TypeError) and "_layers() " in str(error):
                takes = ", ".join(name for name in parameter_names(type(self.model).forward) or () if name != "self")
                error.add_note(
                    f"forward takes ({takes}): before_layers takes the same, after_layers the hidden tensor before it."
                )
            self.error = error
            raise

    def __str__(self) -> str:
        layers = f"layers {self.layers[0]} to {self.layers[-1]}" if self.layers else "no layers"
        return f"pipeline stage {self.index} of stages 0 to {self._number - 1} ({layers})"


def cut_model(
    model: nn.Module, number: int, own: Sequence[int], stage_ids: Callable[[int], Sequence[int]]
) -> tuple[list[Stage], list[Tie], list[int]]:
    """Replace the modules of ``model`` that are not in one of the ``own`` stages; return these stages.

    Args:
        number: of all stages.
        stage_ids: the stage of each layer, from the number of layers.

    Also returns the parameters that several stages hold, and the stage of each layer, which are the same on every
    process.

    Raises:
        ConfigError: the model cannot be cut, or not into that many stages.
    """
    form = _form_of(model)
    ids = _layer_stages(model, form.layers, number, stage_ids)
    places = {f"{form.layers}.{i}": stage for i, stage in enumerate(ids)}
    places |= {name: 0 if is_before else number - 1 for name, is_before in _around(model, form.layers)}
    ties = _ties(model, places)
    modules = dict(model.named_modules())
    parts = {name: modules[name] for name in places if name in modules}  # others are parameters

    def keep(shell: nn.Module, held: set[int]) -> None:
        """Leave only what these stages hold in ``shell``."""
        for name, part in parts.items():
            here = part if places[name] in held else Absent(name, part, passes_input=form.passes_input)
            shell.set_submodule(name, here)
        for name, _ in [*shell.named_parameters(remove_duplicate=False)]:  # that are in no module of another stage
            if name in places and places[name] not in held:
                path, _, leaf = name.rpartition(".")
                delattr(shell.get_submodule(path), leaf)

    stages = []
    shells = [model] if len(own) == 1 else [shell_of(model) for _ in own]
    for index, shell in zip(own, shells, strict=True):
        keep(shell, {index})
        held = [str(i) for i, stage in enumerate(ids) if stage == index]
        stages.append(Stage(shell, form.run, index, number, held))
    if len(own) > 1:
        _share_modules(model, stages, places, parts)
        keep(model, {*own})
    for tie in ties:
        _untie(model, [names for stage, names in tie.names.items() if stage in own])
    return stages, ties, ids


def _layer_stages(model: nn.Module, layers: str, number: int, stage_ids: Callable[[int], Sequence[int]]) -> list[int]:
    """The stage of each layer, checked."""
    found: Any = model.get_submodule(layers)
    if len(found) < number:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} layers ({layers}); {number} pipeline stages need at least"
            f" {number}."
        )
    ids = list(stage_ids(len(found)))
    if len(ids) != len(found):
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} layers ({layers}), but {len(ids)} are placed on stages"
            " (pipeline_num_layers, custom_pipeline_stage_id)."
        )
    return ids


def _share_modules(
    model: nn.Module, stages: Sequence[Stage], places: Mapping[str, int], parts: Mapping[str, nn.Module]
) -> None:
    """Give the stages of one process the modules of ``model`` that contain no layers and belong to no stage."""
    containers = sorted({"", *(name[:end] for name in places for end, sign in enumerate(name) if sign == ".")})
    for stage in stages:
        for container in containers:
            for name, child in model.get_submodule(container).named_children():
                path = f"{container}.{name}".lstrip(".")
                if path not in containers and path not in parts:
                    stage.model.set_submodule(path, child)
        stage.follow(model, containers)


# Forms of models: the name of their layers, and how a stage of them is run.


class _Declared:
    """A model that declares where it can be cut."""

    passes_input = False

    def __init__(self, model: nn.Module) -> None:
        self.layers: str = model.pipeline_layers  # type: ignore[assignment]
        self._takes = parameter_names(type(model).forward)

    def run(self, model: Any, stage: Stage, hidden: Tensor, batch: Any) -> Any:
        arguments, fields = arguments_of(batch, self._takes)
        if stage.is_first:
            hidden = model.before_layers(*arguments, **fields)
        more = model.layer_arguments(*arguments, **fields) if hasattr(model, "layer_arguments") else ()
        layers = model.get_submodule(self.layers)
        for number in stage.layers:
            hidden = layers[int(number)](hidden, *more)
        return model.after_layers(hidden, *arguments, **fields) if stage.is_last else hidden


class _OfTransformers:
    """A model of transformers, whose ``forward`` takes ``inputs_embeds``: its absent modules return their input."""

    passes_input = True

    def __init__(self, model: Any, base: str, layers: str) -> None:
        self.layers, self._base = f"{base}.{layers}".lstrip("."), base
        self._takes = parameter_names(type(model).forward)
        # Its head finds the last token of each sequence by the ids.
        self._reads_ids = type(model).__name__.endswith("ForSequenceClassification")
        self._base_takes = parameter_names(type(model.get_submodule(base)).forward)
        config = model.config.get_text_config()
        self._width = config.hidden_size
        # The loss needs the scores of all routers, which pass from stage to stage behind the hidden states.
        has_scores = getattr(config, "output_router_logits", False)
        self._num_experts = getattr(config, "num_experts", 0) if has_scores else 0

    def run(self, model: Any, stage: Stage, hidden: Tensor, batch: Any) -> Any:
        arguments, fields = arguments_of(batch, self._takes)
        if arguments:
            fields = {"input_ids": arguments[0]}
        base: Any = model.get_submodule(self._base)
        scores = hidden[..., self._width :] if self._num_experts and not stage.is_first else None
        if scores is not None:
            hidden = hidden[..., : self._width]
        if stage.is_last and self._reads_ids and "input_ids" in fields:
            embedding = model.get_input_embeddings()  # of another stage
            embedding.value = hidden
            try:
                return type(model).forward(model, **fields, use_cache=False)
            finally:
                embedding.value = None
        if not stage.is_first:
            fields = {**fields, "inputs_embeds": hidden}
            fields.pop("input_ids", None)
        if stage.is_last:
            with _more_scores(base, scores, self._num_experts):
                return type(model).forward(model, **fields, use_cache=False)  # its own returns the pipeline's outputs
        # Of what follows the layers the last stage alone is to draw, pool or compute a loss.
        _, fields = arguments_of(fields, self._base_takes)
        if not self._num_experts:
            return type(base).forward(base, **fields, use_cache=False, return_dict=False)[0]
        outputs = type(base).forward(base, **fields, use_cache=False, output_router_logits=True, return_dict=True)
        hidden = outputs.last_hidden_state
        own = [one.reshape(*hidden.shape[:-1], -1).to(hidden.dtype) for one in outputs.router_logits or ()]
        return torch.cat([hidden, *([] if scores is None else [scores]), *own], dim=-1)

    @torch.no_grad()
    def check(self, model: Any, number: int) -> None:
        """Check that hidden states pass a stage without layers unchanged: some models scale their embeddings."""
        if getattr(model.config, "output_router_logits", False) and not self._num_experts:
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into {number} pipeline stages: with output_router_logits=True"
                " its loss needs the routers of all layers, and its config has no num_experts. Set it to False, or use"
                " tensor parallelism or ZeRO."
            )
        shell = shell_of(model)
        for name, _ in [*_around(model, self.layers)]:
            shell.set_submodule(name, Absent(name, model.get_submodule(name), passes_input=True))
        layers: Any = model.get_submodule(self.layers)
        for i, layer in enumerate(layers):
            shell.set_submodule(f"{self.layers}.{i}", Absent("", layer, passes_input=True))
        if has_meta(shell):  # values of buffers do not matter here
            shell.to_empty(device=torch.device("cpu"))
        size, device = model.config.get_text_config().hidden_size, next(model.parameters()).device
        hidden = torch.linspace(-1, 1, 3 * size, device="cpu").reshape(1, 3, size)
        hidden = hidden.to("cpu" if device.type == "meta" else device)
        passed = shell.get_submodule(self._base)(inputs_embeds=hidden, use_cache=False, return_dict=False)[0]
        if not (isinstance(passed, Tensor) and passed.shape == hidden.shape and torch.equal(passed, hidden)):
            raise ConfigError(
                f"{type(model).__name__} cannot be cut into {number} pipeline stages: outside of its layers it changes"
                " the hidden states, which each stage would do again. Use tensor parallelism or ZeRO."
            )


@contextmanager
def _more_scores(base: nn.Module, scores: Tensor | None, num_experts: int) -> Iterator[None]:
    """A context in which ``base`` returns the scores of the routers of earlier stages, too."""

    def add(base: nn.Module, inputs: Any, outputs: Any) -> None:
        if scores is not None and scores.numel():  # earlier layers may have no routers
            earlier = torch.split(scores.flatten(0, -2), num_experts, dim=-1)
            outputs.router_logits = (*earlier, *(outputs.router_logits or ()))

    handle = base.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


class _Adapted:
    """A model of one of these forms within a model of peft, whose own ``forward`` passes its arguments on."""

    def __init__(self, form: Any, path: str) -> None:
        self._form, self._path = form, path
        self.layers, self.passes_input = f"{path}.{form.layers}", form.passes_input

    def run(self, model: nn.Module, stage: Stage, hidden: Tensor, batch: Any) -> Any:
        return self._form.run(model.get_submodule(self._path), stage, hidden, batch)


def _form_of(model: nn.Module) -> Any:
    inner, path = without_adapters(model)
    if path:
        return _Adapted(_form_of(inner), path)
    if hasattr(model, "pipeline_layers"):
        missing = [name for name in ("before_layers", "after_layers") if not callable(getattr(model, name, None))]
        if missing:
            raise ConfigError(f"{type(model).__name__} has pipeline_layers, but no {' and no '.join(missing)}.")
        layers = dict(model.named_modules()).get(str(model.pipeline_layers))
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"{type(model).__name__}.pipeline_layers: got {model.pipeline_layers!r}; it must be the name of an"
                " nn.ModuleList of the model."
            )
        return _Declared(model)
    if getattr(model, "supports_pp_plan", False):
        base: Any = model.base_model
        base_name = next((name for name, module in model.named_children() if module is base), "")
        for name in base.config.base_model_pp_plan or ():
            if isinstance(getattr(base, name, None), nn.ModuleList):
                form = _OfTransformers(model, base_name, name)
                if simulation() is None:  # values are compared
                    form.check(model, 2)
                return form
    raise ConfigError(
        f"{type(model).__name__} does not say where it can be cut into pipeline stages: it has neither pipeline_layers"
        " nor the pp_plan of a model of transformers. Add pipeline_layers, before_layers and after_layers (see"
        " docs/parallel.md), or use tensor parallelism or ZeRO."
    )


# Names and places.


def _around(model: nn.Module, layers: str) -> Iterator[tuple[str, bool]]:
    """The largest modules with parameters around the layers, by name, and whether they precede the layers.

    Parameters of the modules that contain the layers precede them.
    """
    module, prefix = model, ""
    for part in layers.split("."):
        yield from ((prefix + name, True) for name, _ in module.named_parameters(recurse=False))
        is_before = True
        for name, child in module.named_children():
            if name == part:
                is_before = False
            elif next(child.parameters(), None) is not None:
                yield prefix + name, is_before
        module, prefix = module.get_submodule(part), f"{prefix}{part}."


def _ties(model: nn.Module, places: Mapping[str, int]) -> list[Tie]:
    ties = []
    for names in tied_names(model):
        at: dict[int, tuple[str, ...]] = {}
        for name in names:
            place = _place_of(name, places)
            at[place] = (*at.get(place, ()), name)
        if len(at) > 1:
            ties.append(Tie(dict(sorted(at.items()))))
    return sorted(ties, key=lambda tie: [*tie.names.values()])


def _place_of(name: str, places: Mapping[str, int]) -> int:
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def _untie(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    """Stages of one process hold copies of a parameter, as stages of several processes do."""
    for names in stages[1:]:
        parameter = model.get_parameter(names[0])
        copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        for name in names:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, copied)

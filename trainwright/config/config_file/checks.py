"""Checks of a config file: one error lists all faults, before anything is built."""

import difflib
import functools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainwright.base.errors import (
    ConfigError,
    ConfigKeyError,
    ConfigTypeError,
    Fault,
    UserError,
    did_you_mean,
    error_of,
    got,
    nearest_of,
)
from trainwright.config import rules
from trainwright.config.config_file.sections import milestone_fault
from trainwright.config.lazy.instantiation import SPECIAL_KEYS, find_target
from trainwright.config.lazy.lazy_config import (
    PACKAGED,
    LazyCall,
    call_fault,
    section_fault,
)
from trainwright.config.lazy.overrides import CANONICAL
from trainwright.config.lazy.provenance import (
    OWN_FILES,
    SECTIONS,
    TARGET,
    are_several,
    is_trusted,
    origin_of,
    override_at,
    overrides_of,
    raw_children,
    shown,
    value_at,
)
from trainwright.config.lazy.targets import dotted_path, short_name, signature_of, unknown_arguments
from trainwright.config.secrets import is_secret_name
from trainwright.config.spec import spec_of_cfg
from trainwright.config.unread import OWN_CODE, warn_of_lists

logger = logging.getLogger("trainwright.config")

_REQUIRED = ("model", "dataloader")
# The nodes that a run instantiates.
_BUILT = (
    "model", "optim", "dataloader", "tokenization", "train.scheduler", "train.evaluation.evaluator",
    *OWN_CODE,
)  # fmt: skip
_PROCESSES = "the processes of the run"
# Keys that a run writes, whose value in a file is that of an earlier run.
_COMPUTED = {
    "train.warmup_iter": "train.warmup_ratio",
    "train.dist.num_nodes": _PROCESSES,
    "train.dist.num_gpus_per_node": _PROCESSES,
    "train.dist.actual_pipeline_stage_id": "train.dist.custom_pipeline_stage_id",
    "train.samples": "train.train_iter or train.train_epoch",
}
_OPTIMIZER_NUMBERS = ("lr", "weight_decay", "eps", "momentum")
# Arguments of another backend's AdamW, which the builder of the optimizer removes.
_ALSO_ACCEPTED = {"do_bias_correction"}


def validate(cfg: DictConfig, *, source: str | None = None) -> None:
    """Check a configuration that :func:`~trainwright.config.config_file.sections.complete` has completed.

    ``source`` is its file. A message names the override that set a wrong value. Targets are imported but not called.
    """
    faults = [*_section_faults(cfg), *_setting_faults(cfg), *_optimizer_faults(cfg), *_target_faults(cfg)]
    faults += _faults_of_rules(cfg, faults)
    if not faults:
        return
    source = source or origin_of(cfg)
    lines = [_line(cfg, fault, source) for fault in _with_reasons_once(faults)]
    if len(lines) == 1:
        raise error_of(faults, lines[0])
    raise error_of(faults, "\n  ".join([f"{len(lines)} faults in the configuration:", *lines]))


def _with_reasons_once(faults: Iterable[Fault]) -> Iterator[Fault]:
    """The faults; the long reason that several refused targets share is that of the first one only."""
    reasons = set[str]()
    for fault in faults:
        what, _, why = fault.text.partition(" is refused: ")
        yield replace(fault, text=f"{what} is refused, as above.") if why in reasons else fault
        reasons |= {why} - {""}


def _line(cfg: DictConfig, fault: Fault, source: str | None) -> str:
    if (override := override_at(cfg, fault.path)) is not None:
        place = f" (set by an override on the command line: {override!r})"
    else:
        file = fault.origin or source
        if file and source and Path(file).is_relative_to(OWN_FILES):
            file = source  # it has changed what a packaged file defines
        place = f" (in {shown(file)})" if file and not Path(file).is_relative_to(OWN_FILES) else ""
    return f"{fault.path}{place}: {fault.text}"


def _section_faults(cfg: DictConfig) -> Iterator[Fault]:
    children = {str(key): child for key, child in raw_children(cfg).items()}
    own = [name for name in children if name not in SECTIONS]
    for name in _REQUIRED:
        node = children.get(name)
        misplaced = _misplaced(name, {one: children[one] for one in own})
        if node is None or node._is_none() or (misplaced and overrides_of(node)):  # an override made it
            near = difflib.get_close_matches(name, own, n=1)
            if near:
                own.remove(near[0])
                yield Fault(near[0], f"no such section. Did you mean {name!r}?", ConfigKeyError)
            else:
                is_script = name == _REQUIRED[-1] and children.keys().isdisjoint(_REQUIRED)
                yield Fault(name, _missing_section(name, misplaced, is_script=is_script), ConfigKeyError)
    for name in own:
        if name.partition(".")[0] in {*SECTIONS, *children} and "." in name:
            text = f"it is one key with dots in its name, which nothing reads. Write cfg.{name} = ..."
            yield Fault(name, text, ConfigKeyError)
        # Other sections are allowed, so only a typing error of one letter is a fault.
        for known in SECTIONS:
            if _is_one_typo_apart(name, known):
                yield Fault(name, f"no such section. Did you mean {known!r}?", ConfigKeyError)
        yield from _secret_faults(children[name], name)
    for name in SECTIONS:
        if (what := section_fault(name, value_at(cfg, name))) is not None:
            yield Fault(name, what, kind=ConfigTypeError)
    yield from _loader_faults(cfg)


def _misplaced(name: str, variables: Mapping[str, Any]) -> dict[str, list[str]]:
    """The variables that have this section, with their other sections."""
    inside = {one: raw_children(node) for one, node in variables.items() if isinstance(node, DictConfig)}
    return {one: [n for n in SECTIONS if n in has and n != name] for one, has in inside.items() if name in has}


def _missing_section(name: str, misplaced: Mapping[str, Sequence[str]], *, is_script: bool) -> str:
    """``misplaced``: variables that have this section, with their other sections."""
    text = f"this section is missing. A run needs {' and '.join(_REQUIRED)}."
    for other, sections in misplaced.items():
        also = f" Its {', '.join(sections)} are not read either." if sections else ""
        text += f" The variable {other!r} is not read: write {name} = ... instead of {other}.{name}.{also}"
    if is_script:
        text += (
            " (A script of the Python API is not a config file: Python runs it, or trainwright launch on several"
            " processes, and the function trainwright.engine.estimate says what it needs.)"
        )
    return text


def _secret_faults(node: Any, path: str) -> Iterator[Fault]:
    """Values that a saved configuration leaves out, in sections of the user."""
    if node._is_missing() and (is_secret_name(path.rpartition(".")[2]) or not is_trusted(node._get_parent())):
        yield _missing_fault(path)
    elif isinstance(node, DictConfig | ListConfig):
        for key, child in raw_children(node).items():
            yield from _secret_faults(child, f"{path}.{key}")


def _loader_faults(cfg: DictConfig) -> Iterator[Fault]:
    loaders = value_at(cfg, "dataloader")
    if loaders is None or section_fault("dataloader", loaders) is not None:
        return
    if not isinstance(loaders, DictConfig):
        yield Fault("dataloader", f"{got(loaders)}; it must be a section with train and test.", kind=ConfigTypeError)
        return
    # An evaluation needs only `test`; a training without `train` is reported when it is built.
    given = [str(key) for key, child in raw_children(loaders).items() if not child._is_none()]
    if not {"train", "test", TARGET} & set(given):
        has = f" The section has {', '.join(given)}." if given else ""
        yield Fault("dataloader.train", f"missing, and so is dataloader.test.{has}", kind=ConfigKeyError)
    test = value_at(loaders, "test")
    if isinstance(test, DictConfig) and TARGET in test:
        text = "got one loader; it must be a list of them, or a dict by name. Write [LazyCall(...)(...)]."
        yield Fault("dataloader.test", text, ConfigTypeError)


def _setting_faults(cfg: DictConfig) -> Iterator[Fault]:
    """Faults of the train and graph sections."""
    from trainwright.config.settings import KEYS, SECTIONS, type_of_sections  # here: loads pydantic
    from trainwright.config.validation import section_faults

    sections = {name: value_at(cfg, name) for name in SECTIONS}
    faults: list[Fault] = []
    values = {k: _plain(v, k, faults) for k, v in sections.items() if v is not None and section_fault(k, v) is None}
    without_value = {fault.path for fault in faults}
    faults += [fault for fault in section_faults(type_of_sections(), values, _hint) if fault.path not in without_value]
    yield from faults
    yield from _own_code_faults(cfg)
    for path, setting in _COMPUTED.items():
        given = (override_at(cfg, path) or "").partition("=")[0]  # which may have made a section above
        if given and f"{path}.".startswith(f"{given}."):
            do = f"Set {setting}" if setting != _PROCESSES else "Start them with trainwright launch -n N, or torchrun"
            yield Fault(path, f"a run computes it, from {setting}, and writes it into config.yaml. {do}.")
    milestones = value_at(value_at(sections["train"], "scheduler"), "milestones")
    if milestones is not None:
        allowed = milestone_fault(milestones) if isinstance(milestones, ListConfig) else "a list of ratios in [0, 1)"
        if allowed is not None:
            yield Fault("train.scheduler.milestones", f"{got(milestones)}; milestones should be {allowed}.")
    for path, key in KEYS.items():
        section, _, name = path.partition(".")
        given = values.get(section, {})
        if not key.has_effect and name in given and given[name] not in (key.default, -1, {"enabled": False}):
            _log_without_effect(path)


def _own_code_faults(cfg: DictConfig) -> Iterator[Fault]:
    """Elements of the lists of callbacks and hooks that are no calls, and such lists outside of ``train``."""
    for key in OWN_CODE:
        nodes = value_at(cfg, key)
        for place, one in enumerate(nodes if isinstance(nodes, ListConfig) else ()):
            is_call = isinstance(one, DictConfig) and TARGET in one
            if (text := call_fault(one)) is not None:
                yield Fault(f"{key}.{place}", text, ConfigTypeError)
            elif one is None or (not is_call and isinstance(one, str | int | float | ListConfig | DictConfig)):
                text = f"{got(one)}; it must be a lazy call: LazyCall(Mine)(...), in YAML {{_target_: module.Mine}}."
                yield Fault(f"{key}.{place}", text, ConfigTypeError)
    warn_of_lists(cfg)


def _faults_of_rules(cfg: DictConfig, faults: Sequence[Fault]) -> Iterator[Fault]:
    """Values that a rule of both APIs refuses, of settings without a fault of their own among ``faults``."""
    from trainwright.config.settings import PLACES  # here: loads pydantic

    above = {fault.path for fault in faults}
    refused = [
        name
        for path in above
        for name, place in PLACES.items()
        if f"{place}.".startswith(f"{path}.") or path.startswith(f"{place}.")
    ]
    spec = spec_of_cfg(cfg, cfg)
    for name, text in list(rules.faults(spec, refused)):
        yield Fault(spec.name_of(name), text)


_INSIDE = 'A file of settings has its section inside: write get_config("common/{0}.py").{0}.'


def _hint(path: Sequence[str], allowed: Iterable[str]) -> str:
    """What other libraries call a key, or the nearest one."""
    from trainwright.config.key_hints import keys_by_name, own_code_hint, train_key_hint  # here: loads pydantic

    if "." in path[-1]:
        return f"It is one key with dots in its name. Write cfg.{'.'.join(path)} = ..."
    if len(path) == 2 and path[0] == path[1] and Path(PACKAGED, "common", f"{path[0]}.py").is_file():
        return _INSIDE.format(path[0])
    if path[:-1] == ["train"]:
        return train_key_hint(path[-1], allowed)
    known = keys_by_name().get(path[-1], "")
    if known.startswith(".".join(path[:-1])):
        return f"Did you mean {known!r}?"
    return own_code_hint(path[-1]) or did_you_mean(path[-1], allowed)


def _plain(value: Any, path: str, faults: list[Fault]) -> Any:
    """Sections as dicts and lists, with interpolations resolved. Lazy calls and objects stay.

    A key without a value is None, and ``faults`` gets the reason.
    """
    if not isinstance(value, DictConfig | ListConfig) or (isinstance(value, DictConfig) and TARGET in value):
        return value
    plain: dict[Any, Any] = {}
    for key in raw_children(value):
        where = f"{path}.{key}"
        child, fault = _value(value, key, where)
        plain[key] = _plain(child, where, faults) if isinstance(child, DictConfig | ListConfig) else child
        if fault is not None:
            faults.append(fault)
    return list(plain.values()) if isinstance(value, ListConfig) else {str(key): item for key, item in plain.items()}


def _optimizer_faults(cfg: DictConfig) -> Iterator[Fault]:
    """Wrong rates, and wrong settings of the groups. The optimizer would report them without their place."""
    for path in _optimizers(cfg):
        optim = value_at(cfg, path)
        params = value_at(optim, "params")
        if isinstance(params, DictConfig) and _name_of_target(params) in ("", "get_default_optimizer_params"):
            yield from _group_faults(path, params)
        betas, usual = value_at(optim, "betas"), _default_of(optim, "betas")
        if isinstance(usual, tuple) and betas is not None and not _are_numbers(betas, len(usual)):
            plain = OmegaConf.to_container(betas) if isinstance(betas, ListConfig) else betas
            text = f"{got(plain)}; it must be {len(usual)} numbers, such as {usual}."
            yield Fault(f"{path}.betas", text, kind=ConfigTypeError)
        for name in _OPTIMIZER_NUMBERS:
            value = value_at(optim, name)
            if isinstance(value, str | bool | ListConfig | DictConfig):
                do = f" Write {value.strip()}, without quotes." if isinstance(value, str) and _is_number(value) else ""
                if isinstance(value, ListConfig) and _are_numbers(value, 1):
                    do = f" Write {value[0]}, without a comma at the end of the line, or brackets."
                yield Fault(f"{path}.{name}", f"{got(value)}; it must be a number.{do}", kind=ConfigTypeError)
            elif name in ("lr", "weight_decay") and isinstance(value, int | float) and not value >= 0:
                yield Fault(f"{path}.{name}", f"{got(value)}; it must be a number >= 0.")


def _group_faults(path: str, params: DictConfig) -> Iterator[Fault]:
    """Wrong settings of the parameter groups of the optimizer at ``path``."""
    from trainwright.config.settings import type_of_group_settings  # here: loads pydantic
    from trainwright.config.validation import section_faults

    kind = type_of_group_settings()
    given = {name: value_at(params, name) for name in kind.__annotations__}
    for fault in section_faults(kind, {name: value for name, value in given.items() if value is not None}):
        yield replace(fault, path=f"{path}.params.{fault.path}")
    if isinstance(model := value_at(params, "model"), str | int | float | ListConfig):
        text = f"{got(model)}; it is the model of the run, added when the optimizer is built: leave the key out."
        yield Fault(f"{path}.params.model", f"{text} For a part of it: {path}.params.part.", ConfigTypeError)
    value, norm = given.get("clip_grad_value"), given.get("clip_grad_max_norm")
    if path != "optim" and value is not None and norm is not None:  # the rules know a single optimizer
        text = rules.both_clippings(value, f"{path}.params.clip_grad_max_norm", norm)
        yield Fault(f"{path}.params.clip_grad_value", text)


def _default_of(node: Any, argument: str) -> Any:
    """The default of an argument of what a node calls; None if there is none, or the target is not found."""
    try:
        signature = signature_of(find_target(node))
    except Exception:  # reported by the check of the target
        return None
    found = None if signature is None else signature.parameters.get(argument)
    return None if found is None else found.default


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _are_numbers(values: Any, number: int) -> bool:
    are_several = isinstance(values, ListConfig | list | tuple) and len(values) == number
    return are_several and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


def _name_of_target(node: DictConfig) -> str:
    """The name of the function or class that a node calls, without its module; "" for a section."""
    target = value_at(node, TARGET)
    return str(getattr(target, "__name__", target or "")).rpartition(".")[2]


def _optimizers(cfg: DictConfig) -> list[str]:
    optim = value_at(cfg, "optim")
    return [f"optim.{name}" for name in optim] if are_several(optim) else ["optim"]


def _target_faults(cfg: DictConfig) -> Iterator[Fault]:
    optimizers = _optimizers(cfg)
    for name in _BUILT:
        for path in optimizers if name == "optim" else [name]:
            section = value_at(cfg, path)
            is_plain = isinstance(section, str | int | float | ListConfig)
            if path != name and (is_plain or (isinstance(section, DictConfig) and TARGET not in section)):
                others = [other.removeprefix("optim.") for other in optimizers if other != path]
                nearest = did_you_mean(path.removeprefix("optim."), others)
                if "optim.optim" in optimizers:
                    nearest = _INSIDE.format("optim")
                text = f"is not an optimizer; optim has several by name. {nearest}"
                yield Fault(path, text, ConfigKeyError)
                continue
            if isinstance(section, LazyCall | type) and path not in SECTIONS:  # those are checked before
                yield Fault(path, str(call_fault(section)), ConfigTypeError)
            yield from _node_faults(section, path, also=_ALSO_ACCEPTED if name == "optim" else set())


def _node_faults(node: Any, path: str, also: set[str] | frozenset[str] = frozenset()) -> Iterator[Fault]:
    if isinstance(node, DictConfig) and isinstance(node._value(), dict):
        if TARGET in node:
            yield from _call_faults(node, path, also)
        keys: list[Any] = [key for key in node if key not in SPECIAL_KEYS]
    elif isinstance(node, ListConfig) and isinstance(node._value(), list):
        keys = list(range(len(node)))
    else:
        return
    for key in keys:
        where = f"{path}.{key}"
        value, fault = _value(node, key, where)
        if fault is not None:
            yield fault
        elif isinstance(value, LazyCall):
            yield Fault(where, str(call_fault(value)), ConfigTypeError, origin_of(node))
        elif isinstance(value, DictConfig | ListConfig):
            yield from _node_faults(value, where)


_TEST_LOADERS = {
    f"trainwright.data.build_{kind}_train_loader": f"build_{kind}_test_loader" for kind in ("image", "nlp")
}


def _call_faults(node: DictConfig, path: str, also: set[str] | frozenset[str]) -> Iterator[Fault]:
    origin = origin_of(node)
    try:
        target = find_target(node)
    except Exception as error:  # the module of the target is user code and may raise anything
        kind = ConfigTypeError if isinstance(error, ConfigTypeError) else ConfigError
        what = "" if isinstance(error, UserError) else f"importing it failed: {type(error).__name__}: "
        yield Fault(f"{path}.{TARGET}", f"{what}{error}", kind=kind, origin=origin)
        return
    test_loader = _TEST_LOADERS.get(str(dotted_path(target)))
    if path.startswith("dataloader.test.") and test_loader is not None and node.get("sampler") is None:
        text = f"got {short_name(target)}, whose loader shuffles and never ends. Write {test_loader}."
        yield Fault(f"{path}.{TARGET}", text, ConfigTypeError, origin)
        return
    names = [str(key) for key in node if key not in SPECIAL_KEYS and key not in also]
    aliases = {f"train.{key}": f" train.{alias} is its other name." for alias, key in CANONICAL.items()}
    faults = unknown_arguments(target, names)
    if also is _ALSO_ACCEPTED and len(faults) > 1 and {"betas", "eps"} >= faults.keys():  # of the packaged AdamW
        name = getattr(target, "__name__", "Optimizer")
        text = f" It is an argument of AdamW, the optimizer before: write optim = LazyCall({name})(...), or del {path}."
        faults = {name: f"{fault}{text}{name}." for name, fault in faults.items()}
    for name, fault in faults.items():
        fault += aliases.get(f"{path}.{name}", "")
        yield Fault(f"{path}.{name}", fault, kind=ConfigKeyError, origin=origin)


def _value(section: Any, key: Any, where: str) -> tuple[Any, Fault | None]:
    """The value with interpolations resolved, or the fault if it has none."""
    if OmegaConf.is_missing(section, key):
        return None, _missing_fault(where)
    try:
        return section[key], None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raw = str(raw_children(section)[key]._value()) if isinstance(section, DictConfig) else ""
        hint = "" if "${." in raw else _nearest_reference(section, reason)  # relative: its key is not that of the root
        return None, Fault(where, f"{reason.removesuffix('.')}.{hint}" if hint else reason, kind=ConfigKeyError)


def _nearest_reference(section: Any, reason: str) -> str:
    """What may be meant by an absolute reference to a key that is not there, as a sentence."""
    found, root = re.search(r"Interpolation key '(.+)' not found", reason), section._get_root()
    if found is None or not isinstance(root, DictConfig):
        return ""
    path = found[1].split(".")
    for number, key in enumerate(path):
        above = value_at(root, ".".join(path[:number])) if number else root
        if not isinstance(above, DictConfig):
            return ""
        if key not in above:
            near = nearest_of(key, map(str, above))
            if near is not None and "[" not in found[1]:
                return f" Did you mean '${{{'.'.join([*path[:number], near, *path[number + 1 :]])}}}'?"
            return "" if number else f" The configuration has {', '.join(map(str, above))}."
    return ""


def _missing_fault(where: str) -> Fault:
    text = f"has no value yet (it is '???'). Set it: {where}=... on the command line."
    return Fault(where, text, ConfigKeyError)


def _is_one_typo_apart(name: str, known: str) -> bool:
    """Whether one letter is missing, wrong or added, or two are exchanged. A plural is another name."""
    is_plural, is_as_long = name == known + "s", abs(len(name) - len(known)) <= 1
    return not is_plural and is_as_long and difflib.SequenceMatcher(None, name, known).ratio() >= 0.8


@functools.cache  # once for each key
def _log_without_effect(key: str) -> None:
    logger.info("%s is accepted and has no effect with torch.", key)

"""The list of the public names: ``python tools/public_names.py > tests/public_names.txt``.

A line is a name, with its signature or type and its default, as the code writes them. A difference between two
versions of the file is a change of the interface; ``docs/stability.md`` says which of them a version may make.
"""

import ast
import copy
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any

from trainwright.cli.commands import COMMANDS, module_of
from trainwright.config.settings import ABSENT, KEYS, TrainerConfig, TrainingConfig, settings_help, type_of_key
from trainwright.config.training.row import Table
from trainwright.config.validation import allowed_text

# What these modules have in ``__all__`` is public. An object of several modules is described in the first.
MODULES = (
    *("trainwright.config", "trainwright.engine", "trainwright.hooks", "trainwright.events", "trainwright.checkpoint"),
    *("trainwright.optim", "trainwright.evaluation", "trainwright.data", "trainwright.data.datasets"),
    *("trainwright.data.transforms", "trainwright.models", "trainwright.models.vit", "trainwright.ops"),
    *("trainwright.ops.image_embedding", "trainwright.parallel", "trainwright.report", "trainwright.cli.train"),
    "trainwright",
)
# Of these only some names are public.
SOME_NAMES = {"trainwright.cli.train": ["main"]}
# Members without an underscore that only other parts of the package use: they may change in every version.
INTERNAL = {
    "TrainingConfig": "as_set field_of is_by_its_page name_of shown_name",
    "Trainer": "run_kind described_samples steps_in_epoch",
    "DefaultTrainer": "run_kind described_samples",
    "TrainerBase": "called_hooks evaluates_on_start has_trained is_copy is_ended is_training"
    " plan_calls plan_end prepare_steps samples_done samples_per_iter step_seconds steps_before unfinished_stop",
    "EagerTrainer": "has_own_run_step new_step prepare_own_steps train_micro_batch",
    "HookBase": "before_estimate before_longer_run best_result changes_final_weights changes_process described_start"
    " ends_run in_copies is_idle is_state_of_rank may_change_data place shows_results steps_schedule uses_results",
    "Callback": "has_ended_run may_change_data",
    "CallbackList": "collect",
    "EarlyStoppingCallback": "is_default turned_off_by",
    "Interruptions": "end_evaluation requests stopping_evaluations",
    "Logs": "count defer numbers unread",
    "RunCallbacks": "current_results epoch_loss epoch_loss_of_all next_batch",
    "TrainerControl": "is_cut_epoch is_extra_evaluation",
    "EventStorage": "admit_logged alike convert_soon end_epoch evaluated_weights first_local_iteration"
    " histories_so_far is_over line_at means_since media put_mean read_so_far reduce refuse_logged",
    "EventWriter": "begin",
    "HistoryBuffer": "extend frozen move_last newest replace_last values_of_last_iterations values_since",
    "PeriodicWriter": "warn_of_late",
    "PhaseTimes": "count_compile counting",
    "ProgressAwareHandler": "emit format",
    "Checkpointer": "attachments check_folder check_newest in_folder",
    "DatasetEvaluator": "batch_samples known_results",
    "MetricsHandler": "are_targets_probabilities declare_scores declare_targets is_default known_results shifts_labels",
    "TMMetrics": "declare_scores declare_targets flush has_samples ignores_label",
    "TorchMetricsHandler": "ignores_label train_copy",
    "CyclicSampler": "ask_length begin_epoch epoch_at index_tensors indices_at length_state limit_epochs"
    " load_length_state micro_batches num_samples place_at",
    "SingleRoundSampler": "ask_length index_at index_tensors indices_at micro_batches num_samples",
    "EpochSampler": "ask_length begin_epoch index_tensors indices_at micro_batches num_samples set_batches_done",
    "Dataset": "connect",
    "OCRDataset": "read_file",
    "SpeechRecognitionDataset": "read_file",
    "SequenceLabelingDataset": "normalized read_file",
    "TextClassificationDataset": "normalized read_file",
    "TextGenerationDataset": "normalized read_file",
    "MixedDataset": "sample_order",
    "MixedStream": "is_endless",
    "StreamLoader": "first_reads peek",
    "Bert": "has_pooler",
    "Run": "last_loss last_sign",
}
_HEAD = """\
# The public names of trainwright, compared with the package by tests/house/test_public_names.py.
# Made by: python tools/public_names.py > tests/public_names.txt
"""
_OPERATORS = ("__call__", "__len__", "__iter__", "__getitem__", "__contains__", "__enter__")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SIMPLE = (bool, int, float, str, type(None))


def public_names() -> str:
    """The content of the file."""
    sections = [*_sections_of_modules(), *_sections_of_settings(), _section_of_commands()]
    return "\n".join([_HEAD, *(f"[{title}]\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections)])


def names_of(module: str) -> list[str]:
    """The public names of a module: its ``__all__``, or, without one, what it defines without an underscore."""
    if module in SOME_NAMES:
        return SOME_NAMES[module]
    loaded = importlib.import_module(module)
    own = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module]
    names = {*getattr(loaded, "__all__", filter(_is_public, own))}
    return sorted(names, key=lambda name: (name.lower(), name))


def _sections_of_modules() -> Iterator[tuple[str, list[str]]]:
    paths: dict[int, str] = {}  # the first path of each object, where it is described
    values = {module: {name: getattr(importlib.import_module(module), name) for name in names_of(module)}
              for module in MODULES}  # fmt: skip
    for module in MODULES:
        for name, value in values[module].items():
            if callable(value) or isinstance(value, ModuleType):
                paths.setdefault(id(value), f"{module}.{name}")
    for module in MODULES:
        lines = []
        for name, value in values[module].items():
            path = paths.get(id(value), f"{module}.{name}")
            if isinstance(value, ModuleType):
                lines.append(f"{name}: the module {value.__name__}")
            elif path != f"{module}.{name}":
                lines.append(f"{name}: {path}")
            else:
                lines += _lines(name, value, paths)
        yield module, lines


def _lines(name: str, value: Any, paths: dict[int, str]) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, Enum):
        yield f"{name}: one of {', '.join(f'{member.name}={member.value!r}' for member in value)}"
    elif isinstance(value, type):
        yield from _lines_of_class(name, value, paths)
    elif inspect.isroutine(value):
        yield from (f"{name}{text}" for text in _signatures(inspect.unwrap(value)))
    elif name == "__version__":
        yield f"{name}: str"
    else:
        yield f"{name}: {type(value).__name__}"


def _lines_of_class(name: str, kind: type, paths: dict[int, str]) -> Iterator[str]:
    """A class, its constructor and its members, without those that a public base has in the same form."""
    public = [base for base in kind.__mro__[1:] if id(base) in paths]
    bases = [paths[id(base)] for base in public if not any(base in other.__mro__[1:] for other in public)]
    yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
    internal = {word for one in kind.__mro__ for word in INTERNAL.get(one.__name__, "").split()}
    inherited: dict[str, list[str]] = {}
    for base in reversed(public):
        inherited |= _members(base)
    members: dict[str, list[str]] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("trainwright.") and not any(one in base.__mro__ for base in public):
            members |= _members(one)
    for member in sorted(members, key=lambda member: (not member.startswith("__"), member)):
        is_redefined = member in inherited and (inherited[member] == members[member] or " = " in members[member][0])
        if not is_redefined and member not in internal:
            yield from (f"  {name}.{member}{text}" for text in members[member])


@functools.cache
def _members(kind: type) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in _statements(_node_of(kind).body):
        if isinstance(node, _Function):
            _add_function(found, node, kind)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not issubclass(kind, Table) and _is_public(node.target.id):
                found[node.target.id] = [f": {ast.unparse(node.annotation)}{_value(node.value)}"]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and _is_public(target.id):
                    value = getattr(kind, target.id)
                    is_function = inspect.isfunction(value) and "lambda" not in value.__qualname__
                    found[target.id] = _signatures(value) if is_function else [_value(node.value)]
    return found


def _value(node: ast.expr | None) -> str:
    """A value that is written there, not computed."""
    try:
        ast.literal_eval(node)  # type: ignore[arg-type]
    except ValueError:
        return " = ..." if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field") else ""
    return f" = {ast.unparse(node)}"  # type: ignore[arg-type]


def _add_function(found: dict[str, list[str]], node: _Function, kind: type) -> None:
    decorators = [ast.unparse(one) for one in node.decorator_list]
    name = node.name
    if name == "__init__":
        _add_attributes(found, kind, node)
    if not (_is_public(name) or name == "__init__" or name in _OPERATORS) or not hasattr(kind, name):
        return
    if any(one.endswith("property") for one in decorators):
        found[name] = [f": {ast.unparse(node.returns) if node.returns else 'Any'}"]
    elif f"{name}.setter" in decorators:
        found[name] = [f"{found[name][0]} (settable)"]
    elif not any(one.startswith(f"{name}.") for one in decorators):
        text = _signature(node, getattr(kind, name))
        if name in found and not any("overload" in one for one in decorators):
            return  # the implementation of overloads
        found.setdefault(name, []).append(text)


def _add_attributes(
    found: dict[str, list[str]], kind: type, constructor: ast.FunctionDef | ast.AsyncFunctionDef
) -> None:
    """What a constructor keeps of its arguments, and what the docstring of the class lists."""
    arguments = constructor.args
    types = {one.arg: one.annotation for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    _, _, documented = (kind.__doc__ or "").partition("Attributes:\n")
    names = {name for names in re.findall(r"(?m)^\s+([\w, ]+):", documented) for name in names.split(", ")}
    for node in ast.walk(constructor):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and _is_public(target.attr):
                annotation = node.annotation if isinstance(node, ast.AnnAssign) else types.get(target.attr)
                if target.attr in types or target.attr in names:
                    found.setdefault(target.attr, [f": {ast.unparse(annotation)}" if annotation is not None else ""])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _signatures(function: Any) -> list[str]:
    node = _node_of(function)
    return [_signature(node, function)] if isinstance(node, _Function) else [""]  # "": made by another function


def _signature(node: _Function, function: Any) -> str:
    """As the code writes it, with the values of the defaults that are constants."""
    arguments = copy.deepcopy(node.args)
    pairs = [*zip(arguments.args[::-1], arguments.defaults[::-1], strict=False)]
    pairs += [
        (one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    parameters = inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters
    for one, default in pairs:
        value = parameters[one.arg].default
        if not isinstance(default, ast.Constant) and type(value) in _SIMPLE:
            _replace(arguments, default, ast.Constant(value))
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls") and not first[0].annotation:
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"({ast.unparse(arguments)}){returns}"


def _replace(arguments: ast.arguments, default: ast.expr, value: ast.expr) -> None:
    for group in (arguments.defaults, arguments.kw_defaults):
        for index, other in enumerate(group):
            if other is default:
                group[index] = value


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _node_of(value: Any) -> Any:
    """The statement that makes a class or a function; None if it is made otherwise."""
    node: Any = _tree(value.__module__)
    for name in value.__qualname__.split("."):
        definitions = [one for one in _statements(node.body) if isinstance(one, ast.ClassDef | _Function)]
        named = [one for one in definitions if one.name == name]
        if not named:
            return None
        node = named[0]
    return node


def _sections_of_settings() -> Iterator[tuple[str, list[str]]]:
    of_trainer = settings_help(TrainerConfig)
    lines: list[str] = []
    for name, info in settings_help(TrainingConfig).items():
        default, other = (_default(one) for one in (info, of_trainer[name]))
        lines.append(f"{name}: {info['allowed']}{default}" + ("" if other == default else f" (TrainerConfig:{other})"))
        lines += [f"{alias}: {name}" for alias in info["other_names"]]
    yield "settings of TrainingConfig", sorted(lines)
    found = []
    for name, key in KEYS.items():
        default = (
            "" if key.default is ABSENT else f" = {key.default!r}" if not callable(key.default) else " = a lazy call"
        )
        found.append(f"{name}: {allowed_text(type_of_key(name))}{default}")
    yield "keys of config files", sorted(found)


def _default(info: dict[str, Any]) -> str:
    return f" = {info['default']!r}" if "default" in info else " required"


def _section_of_commands() -> tuple[str, list[str]]:
    lines = []
    for command in sorted(COMMANDS):
        lines += _lines_of_parser(f"trainwright {command}", importlib.import_module(module_of(command)).parser())
    return "command line", lines


def _lines_of_parser(name: str, parser: Any) -> Iterator[str]:
    yield name
    for action in parser._actions:
        if isinstance(getattr(action, "choices", None), dict):
            for word, inner in action.choices.items():
                yield from _lines_of_parser(f"{name} {word}", inner)
        elif action.option_strings and "--help" not in action.option_strings:
            yield f"  {name} {', '.join(action.option_strings)}"
        elif not action.option_strings:
            yield f"  {name} {action.metavar or action.dest}"


if __name__ == "__main__":
    print(public_names(), end="")

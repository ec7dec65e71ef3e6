"""The reference pages of the settings: ``python tools/reference_page.py [config] > docs/PAGE.md``.

``docs/trainer-config.md`` of the Python API, and with ``config`` ``docs/config-reference.md`` of config files.
"""

import re
import sys
from functools import partial
from typing import Any

from pydantic.fields import FieldInfo

from trainwright.config.settings import ABSENT, KEYS, TrainerConfig, TrainingConfig, settings_help, type_of_key
from trainwright.config.torch_names import LRSchedulerType, TaskType
from trainwright.config.training.row import CATEGORIES, Changed
from trainwright.config.validation import allowed_text

_HEAD = """# Settings of the Trainer

[//]: # (Made by `python tools/reference_page.py > docs/trainer-config.md`.)

`TrainingConfig` and `TrainerConfig`, its subclass for a training with a `task`, have the same settings with different
defaults. Two names of a setting with different values are an error, and so is an unknown name; one message lists all
faults. Changes are checked like a new configuration, so dicts and lists are replaced, not modified:

```python
from trainwright import TrainingConfig

config = TrainingConfig(batch_size=16, lr=1e-3)
config.early_stopping = {"patience": 2}  # its other keys keep their defaults
# settings that depend on each other change together
config.update(eval_strategy="step", eval_steps=100)
config.save_to_yaml("config.yaml")  # {category: {setting: value}}
assert TrainingConfig.load_from_yaml("config.yaml") == config
```

A file may contain some of the settings, with or without categories. A setting in a file counts as set by you; in a
saved file, which has all settings, those that its first line names.
`get_config_help()` prints this page's tables, `dump_default_yaml(path)` writes a file to start from, and
`TrainingConfig.model_json_schema()` is for editors.

Settings that are changed after the `Trainer` was built are used by its next `train()`, if the last column says so; it
refuses changes of the others.

A step is one batch of one process; an update changes the weights, once in `gradient_accumulation_steps` steps. A share
is a float such as 0.25 or 1.0.
"""

_TAIL = f"""
The tasks: {", ".join(f"`{name}`" for name in TaskType.words())}.

Short names of `lr_scheduler`: {", ".join(f"`{kind}` ({kind.torch_name})" for kind in LRSchedulerType)}.
Other classes of `torch.optim.lr_scheduler` have their own names.

An optimizer, a loss, a schedule with arguments: `{{"name_": "SGD", "momentum": 0.9}}`. A metric:
`MetricConfig("f1", n_decimals=2)` or `{{"name": "f1", "n_decimals": 2}}`. It has `objective`, `output_keys` and
`n_decimals`; other arguments are passed to the metric.
"""


def reference_page() -> str:
    """The page, in Markdown."""
    shared, for_tasks = settings_help(TrainingConfig), settings_help(TrainerConfig)
    parts = [_HEAD]
    for category in CATEGORIES:
        parts.append(
            f"\n## {category.capitalize()}\n\n"
            "| setting | other names | allowed | default (TrainerConfig) | | changed later |\n"
            "|---|---|---|---|---|---|\n"
        )
        for name, info in shared.items():
            if info["category"] == category:
                cells = [
                    f"`{name}`",
                    _other_names(info),
                    _short(info["allowed"]),
                    _default(info, for_tasks[name]),
                    info["help"],
                    _changed(TrainingConfig.rows[name].changed),
                ]
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join([*parts, _TAIL])


def _changed(changed: Changed) -> str:
    """When a change after the trainer was built is used."""
    if callable(changed):
        return "next `train()`: from 'epoch' to 'step' or back"
    return "next `train()`" if changed == "train" else ""


_SHORT = {
    "True or False": "bool",
    "a whole number": "int",
    "a number": "float",
    "text that is not empty": "text",
    "a fraction of the steps such as 0.5 or 1.0": "a share",
    "a share of the batches such as 0.25 or 1.0": "a share",
    "a share of all iterations such as 0.25": "a share",
}


def _short(allowed: str) -> str:
    """The allowed values in the words of a table: a share is explained above it."""
    for long, short in _SHORT.items():
        allowed = re.sub(rf"(?<!without ){re.escape(long)}", short, allowed)  # with or without a number ('cuda:0')
    return allowed.replace(", or None", ", None")


def _other_names(info: dict[str, Any]) -> str:
    notes = {name: TrainingConfig.aliases[name].note for name in info["other_names"]}
    return ", ".join(f"`{name}`" + (f" ({note})" if note else "") for name, note in notes.items())


def _default(info: dict[str, Any], for_tasks: dict[str, Any]) -> str:
    here = f"`{info['default']!r}`"
    there = f"`{for_tasks['default']!r}`" if "default" in for_tasks else "required"
    return here if here == there else f"{here} ({there})"


_KEYS_HEAD = """# Keys of config files

[//]: # (Made by `python tools/reference_page.py config > docs/config-reference.md`.)

The keys of the sections `train` and `graph`, which are fixed. The other sections, `model`, `optim`, `dataloader` and
`tokenization`, are [lazy calls](config.md). Periods are iterations, which are updates; a share is a float such as 0.25,
of all iterations.
`eval_period`, `topk` and `recompute_grad` are other names of `evaluation.eval_period`, `evaluation.evaluator.topk` and
`activation_checkpoint`. What is changed in `trainer.cfg` after the trainer was built is used by its next `train()`, if
the column says so; it refuses changes of other keys, and of the lazy calls. The last column is the setting of the
[Python API](trainer-config.md).

| key | allowed | default | | changed later | Python API |
|---|---|---|---|---|---|
"""


def keys_page() -> str:
    """The page of config files, in Markdown."""
    rows, names = [], {row.place: f"`{name}`" for name, row in TrainingConfig.rows.items()}
    for path, key in KEYS.items():
        kind = type_of_key(path)
        help = next(item.description for item in reversed(kind.__metadata__) if isinstance(item, FieldInfo)) or ""
        help = help if key.has_effect else "Without effect."
        default = "" if key.default is ABSENT else f"`{key.value(lambda name: partial(_call, name))!r}`"
        cells = [
            f"`{path}`",
            _short(allowed_text(kind)),
            default,
            help,
            _changed(key.changed),
            names.get(path, ""),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join([_KEYS_HEAD, *rows])


def _call(target: str, **arguments: Any) -> str:
    return f"{target.rpartition('.')[2]}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


if __name__ == "__main__":
    print(keys_page() if sys.argv[1:] == ["config"] else reference_page(), end="")

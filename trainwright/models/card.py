"""Model cards: a ``README.md`` that describes a model and its results, with metadata for the hub in its first lines."""

import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainwright.base.errors import ConfigTypeError
from trainwright.base.files import atomic_write, make_folders
from trainwright.config.secrets import redact, without_secrets
from trainwright.config.yaml_file import plain, to_text

CARD_NAME = "README.md"
LIBRARY = "trainwright"

# The hub's names of tasks, where they are not ours with hyphens.
_HUB_TASKS = {
    "image2text": "image-to-text",
    "sequence_labeling": "token-classification",
    "speech_recognition": "automatic-speech-recognition",
    "mask_filling": "fill-mask",
}
Several = str | Sequence[str] | None


@dataclass
class ModelCard:
    """The content of a model card; fields that are None are omitted.

    Args:
        model_name: the heading; "model" by default.
        model_architecture: such as the name of its class.
        model_overview: a text in Markdown.
        language, tags, tasks, datasets, datasets_tags: one or several; ``datasets_tags`` are the ids of ``datasets`` on
            the hub.
        dataset_args: how a dataset was used: a text, or settings by name.
        eval_results: metrics by name.
        eval_lines: their history: mappings, which become the rows of a table.
        training_summary: a text, or values by name.
        training_config: settings by name, or an object with ``to_dict``; secrets are not written.
        usage: how to load the model, a text in Markdown.
        source: the part of the library that wrote the card.
    """

    model_name: str | None = None
    model_architecture: str | None = None
    model_overview: str | None = None
    language: Several = None
    tags: Several = None
    tasks: Several = None
    datasets: Several = None
    datasets_tags: Several = None
    dataset_args: Any = None
    eval_results: Mapping[str, Any] | None = None
    eval_lines: Sequence[Mapping[str, Any]] | None = None
    training_summary: Any = None
    training_config: Any = None
    usage: str | None = None
    source: str = "trainer"

    def save_model_card(self, path: str | os.PathLike[str]) -> Path:
        """Write the card into a folder as ``README.md``, or into the file ``path``, if that ends with ``.md``."""
        file = Path(path)
        if file.suffix.lower() != ".md":
            file = file / CARD_NAME
        make_folders(file.parent)
        atomic_write(file, self.to_text().encode())
        return file

    def to_text(self) -> str:
        """The complete card: metadata in YAML between ``---`` lines, then Markdown.

        Raises:
            ConfigTypeError: a field is of a type that cannot be written.
        """
        parts = [f"---\n{self._metadata()}\n---\n", f"# {_inline(self._name())}\n", *self._sections()]
        return "\n".join(parts)

    def _name(self) -> str:
        return re.sub(r"\s+", " ", self.model_name or "").strip() or "model"

    def _metadata(self) -> str:
        """The fields that the hub knows, as YAML."""
        from huggingface_hub.repocard_data import ModelCardData

        own_names = _several(self.tasks, "tasks")
        tasks = [_HUB_TASKS.get(name, name.replace("_", "-")) for name in own_names]
        names, ids = _several(self.datasets, "datasets"), _several(self.datasets_tags, "datasets_tags")
        results = self._results(tasks[0] if tasks else "other", names, ids)
        data: Any = ModelCardData(
            language=_several(self.language, "language") or None,
            library_name=LIBRARY,
            pipeline_tag=tasks[0] if tasks else None,
            tags=[*_several(self.tags, "tags"), *tasks] or None,
            datasets=ids or names or None,
            model_name=self._name() if results else None,
            eval_results=results or None,
        )
        # Programs read it, and each checkpoint has one: libyaml is six times as fast as PyYAML's own writer.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        text: str = yaml.dump(data.to_dict(), Dumper=dumper, sort_keys=False, allow_unicode=True)
        return text.strip()

    def _results(self, task: str, names: list[str], ids: list[str]) -> list[Any]:
        from huggingface_hub.repocard_data import EvalResult

        return [
            EvalResult(
                task_type=task,
                task_name=task.replace("-", " ").capitalize(),
                dataset_type=(ids or names or ["unknown"])[0],
                dataset_name=", ".join(names or ids) or "evaluation data",
                dataset_args=plain(self.dataset_args, others_as_text=True) or None,
                metric_type=str(name).removeprefix("evaluation.").removeprefix("eval_"),
                metric_name=str(name),
                metric_value=int(value) if isinstance(value, numbers.Integral) else float(value),
            )
            for name, value in (self.eval_results or {}).items()
            if isinstance(value, numbers.Real) and math.isfinite(value)
        ]

    def _sections(self) -> list[str]:
        lists = {
            "Architecture": [self.model_architecture] if self.model_architecture else [],
            "Tasks": _several(self.tasks, "tasks"),
            "Datasets": _several(self.datasets, "datasets") or _several(self.datasets_tags, "datasets_tags"),
        }
        facts = [f"* **{name}**: {', '.join(map(_inline, values))}" for name, values in lists.items() if values]
        if self.dataset_args:
            facts.append(f"* **Dataset arguments**: {_inline(self.dataset_args)}")
        sections = ["\n".join([*facts, ""])] if facts else []
        if self.model_overview:
            sections.insert(0, f"{self.model_overview.strip()}\n")
        if self.usage:
            sections.append(f"## Use\n\n{self.usage.strip()}\n")
        if self.eval_results:
            sections.append("## Results\n\n" + _table([("metric", "value"), *self.eval_results.items()]))
        if self.eval_lines:
            names = list(dict.fromkeys(name for line in self.eval_lines for name in line))
            rows = [[line.get(name, "") for name in names] for line in self.eval_lines]
            sections.append("## Evaluations during training\n\n" + _table([names, *rows]))
        if self.training_summary:
            summary = str(self.training_summary).strip()
            if isinstance(self.training_summary, Mapping):
                summary = "\n".join(f"* **{_inline(n)}**: {_inline(v)}" for n, v in self.training_summary.items())
            sections.append(f"## Training\n\n{summary}\n")
        if self.training_config is not None:
            text = settings_text(self.training_config).rstrip()
            fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
            sections.append(f"## Training configuration\n\n{fence}yaml\n{text}\n{fence}\n")
        return [*sections, f"Written by the {LIBRARY} {_inline(self.source)}.\n"]


def _several(value: Several, name: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [str(plain(value))]
    if not isinstance(value, Sequence | set | frozenset) or not all(isinstance(item, str) for item in value):
        raise ConfigTypeError(f"ModelCard.{name}: got {value!r}; it must be a text, or a list of texts.")
    return [str(plain(item)) for item in value]  # of NumPy or an enum, for example, which YAML does not know


def _inline(value: Any) -> str:
    """Text that stays in its line, and in its cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"\s+", " ", text).strip().replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _table(rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(map(_inline, row)) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join([*lines, ""])


def settings_text(config: Any) -> str:
    """A ``training_config`` as a card shows it, without secrets."""
    if isinstance(config, str):
        return redact(config)
    tree = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(tree, Mapping):
        raise ConfigTypeError(
            f"ModelCard.training_config: got {type(config).__name__}; it must be a mapping, a text, or have to_dict()."
        )
    return to_text(without_secrets(plain(tree, others_as_text=True))[0])

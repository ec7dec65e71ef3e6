"""Values of a config file that no training reads are named before it starts."""

from pathlib import Path

import pytest

from trainwright.config import LazyConfig
from trainwright.config.unread import warn_of_names
from trainwright.config.yaml_file import with_format

BASE = """\
.shared: &shared
  num_workers: 0
model:
  _target_: torch.nn.Linear
  in_features: 4
{more}
width: 8
more: &more {{size: 2}}
dataloader:
  train: {{<<: [*shared, *more], other: "${{width}}"}}
"""


def warnings(folder: Path, caplog: pytest.LogCaptureFixture, more: str, *, saved: bool = False) -> list[str]:
    text = BASE.format(more=more)
    file = folder / "config.yaml"
    file.write_text(with_format(text) if saved else text)
    warn_of_names(LazyConfig.load(file), str(file))
    return [message.partition("config.yaml, ")[2] for message in caplog.messages]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("out_features: 2", "line 6: nothing reads out_features. Did you mean 'model.out_features'?"),
        ("out_faetures: 2", "line 6: nothing reads out_faetures. Did you mean 'model.out_features'?"),
        ("lr: 0.1", "line 6: nothing reads lr. A training reads optim.lr."),
        ("log_period: 5", "line 6: nothing reads log_period. A training reads train.log_period."),
        ("trian: {seed: 1}", "line 6: nothing reads trian. Did you mean 'train'?"),
        ("scheduler: {lr: 1}", "line 6: nothing reads scheduler. A training reads train.scheduler."),
        ("callbacks: early", "line 6: nothing reads callbacks. A training reads train.callbacks."),
        ("resume_from: x", "line 6: nothing reads resume_from. Start with --resume."),
        ("zzz: 1", "line 6: nothing reads zzz. A training reads model, dataloader, train, optim, graph, tokenization."),
    ],
)
def test_a_key_at_the_top_of_a_yaml_file_is_named_with_the_one_to_write(more, text, tmp_path, caplog):
    assert warnings(tmp_path, caplog, more) == [text]


def test_a_tuple_of_python_is_named_with_the_list_to_write_and_a_text_in_quotes_is_a_text(tmp_path, caplog):
    more = "train:\n  topk: (1,)\n  betas:\n  - (0.9, 0.95)\noptim: {tag: '(0, 18)', name: (a b)}"
    assert warnings(tmp_path, caplog, more) == [
        "line 7: train.topk: (1,) is a text, because YAML has no tuples. Write [1].",
        "line 9: train.betas.0: (0.9, 0.95) is a text, because YAML has no tuples. Write [0.9, 0.95].",
    ]
    caplog.clear()
    assert warnings(tmp_path, caplog, more, saved=True) == []


@pytest.mark.parametrize(
    "more",
    [
        "size: 2\ntrain: {output_dir: 'out/${size}'}",
        "size: 2\ntrain: {output_dir: '${sizes[${size}]}'}\nsizes: {2: a}",
        "common:\n  width: &width 16\ntrain: {log_period: *width}",
        "'quoted': &q 4\ntrain: {log_period: *q}",
        "later:\n  &later {a: 1}\n<<: *later",
        "project_root: ..",
    ],
)
def test_keys_that_the_text_refers_to_are_no_warnings(more, tmp_path, caplog):
    assert warnings(tmp_path, caplog, more) == []


def test_the_defaults_of_hydra_are_named_as_not_read(tmp_path, caplog):
    file = tmp_path / "config.yaml"
    file.write_text("\ufeffdefaults:\n- experiment/long\nmodel: {_target_: torch.nn.Linear}\n", encoding="utf-8")
    warn_of_names(LazyConfig.load(file), str(file))
    (message,) = caplog.messages
    assert "line 1: nothing reads defaults. It is of Hydra: the settings of these files are not read." in message


def test_keys_that_others_refer_to_or_that_a_run_has_saved_are_no_warnings(tmp_path, caplog):
    assert warnings(tmp_path, caplog, "") == []
    assert warnings(tmp_path, caplog, "zzz: 1", saved=True) == []


def test_own_code_may_read_any_key(tmp_path, caplog):
    assert warnings(tmp_path, caplog, "zzz: 1\ntrain: {hooks: [{_target_: my.Hook}]}") == []

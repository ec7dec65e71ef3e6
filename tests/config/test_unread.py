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
defaults: &defaults {{size: 2}}
dataloader:
  train: {{<<: *shared, size: "${{width}}"}}
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
        ("zzz: 1", "line 6: nothing reads zzz. A training reads model, dataloader, train, optim, graph, tokenization."),
    ],
)
def test_a_key_at_the_top_of_a_yaml_file_is_named_with_the_one_to_write(more, text, tmp_path, caplog):
    assert warnings(tmp_path, caplog, more) == [text]


def test_keys_that_others_refer_to_or_that_a_run_has_saved_are_no_warnings(tmp_path, caplog):
    assert warnings(tmp_path, caplog, "") == []
    assert warnings(tmp_path, caplog, "zzz: 1", saved=True) == []


def test_own_code_may_read_any_key(tmp_path, caplog):
    assert warnings(tmp_path, caplog, "zzz: 1\ntrain: {hooks: [{_target_: my.Hook}]}") == []

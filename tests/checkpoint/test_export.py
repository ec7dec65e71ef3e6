"""The export of a checkpoint of one process; those of several are in `test_sharded_saving`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainwright.checkpoint import Checkpointer, CheckpointError
from trainwright.checkpoint.export import export_weights
from trainwright.cli.main import main


def save(folder: Path) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().T.contiguous())
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpointer(model, folder, optimizer=optimizer, asynchronous=False).save("model_0000001", iteration=1)
    return model


def test_the_exported_file_loads_as_the_checkpoint_does(tmp_path: Path) -> None:
    model = save(tmp_path / "run")
    export_weights(tmp_path / "run" / "model_0000001", tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["out", "model.safetensors"]
    assert "0.weight" not in load_file(tmp_path / "new" / "out" / "model.safetensors")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.zero_()
    Checkpointer(model).load(tmp_path / "new" / "out" / "model.safetensors", checkpointables=[], strict=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "run")
    with open(tmp_path / "run" / "model_0000001" / "model.safetensors", "r+b") as file:
        file.write(b"damage")
    with pytest.raises(CheckpointError, match="is damaged"):
        export_weights(tmp_path / "run" / "model_0000001", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main(["checkpoint", "export", str(tmp_path / "run")]) == 2


def test_by_default_the_folder_is_named_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "export", "run"]) == 0
    assert capsys.readouterr().out.startswith("run/model_0000001: 8 tensors")
    assert (tmp_path / "run-export" / "model.safetensors").is_file()

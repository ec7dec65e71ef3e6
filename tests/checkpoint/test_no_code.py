"""Nothing that a run writes is a pickle, and nothing that data holds is run: neither by a load nor by a look at it.

Each payload touches a canary file when it is run. That they do is tested first.
"""

import contextlib
import io
import json
import os
import pickle
import pickletools
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from tests.checkpoint.conftest import look_with_every_command, put
from trainwright import LazyConfig, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError, UserError
from trainwright.checkpoint import Checkpointer, CheckpointError, verify
from trainwright.cli.main import main
from trainwright.hooks import BestCheckpointer, PeriodicCheckpointer

CANARY = Path(os.devnull).parent / "nothing"  # set for each test; see `canary`


class Runs:
    """Becomes a call when it is read back."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file that exists as soon as a payload has run. No test may create it."""
    path = tmp_path_factory.mktemp("canary") / "sings"
    yield path
    assert not path.exists(), "a payload was run"


def payloads(canary: Path) -> dict[str, bytes]:
    """Files that run a command when a careless reader takes them."""
    command = f"touch {canary}"
    found = {f"pickle {protocol}": pickle.dumps(Runs(os.system, command), protocol) for protocol in range(6)}
    found["pickle of exec"] = pickle.dumps(Runs(exec, f"import os; os.system({command!r})"))
    found["pickle of Popen"] = pickle.dumps(Runs(subprocess.Popen, ["touch", str(canary)]))
    found["pickle in a state"] = pickle.dumps({"state": {}, "param_groups": [{"params": [Runs(os.system, command)]}]})
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"weight": Runs(os.system, command)}, file, _use_new_zipfile_serialization=zipped)
        found[f"torch.save, zip {zipped}"] = file.getvalue()
    found["yaml"] = f'!!python/object/apply:os.system ["{command}"]\n'.encode()
    found["jsonpickle"] = json.dumps({"py/reduce": [{"py/function": "os.system"}, {"py/tuple": [command]}]}).encode()
    found["target"] = json.dumps({"_target_": "os.system", "command": command}).encode()
    found["expression"] = f"__import__('os').system({command!r})".encode()
    found["header"] = struct.pack("<Q", len(found["target"])) + found["target"]
    return found


PAYLOADS = sorted(payloads(CANARY))


def test_the_payloads_run_where_a_reader_is_careless(tmp_path: Path) -> None:
    found = payloads(tmp_path / "sings")
    careless: dict[str, Callable[[bytes], Any]] = {
        "yaml": lambda content: yaml.load(content, Loader=yaml.UnsafeLoader),
        "expression": lambda content: eval(content),
        "torch.save, zip True": lambda content: torch.load(io.BytesIO(content), weights_only=False),
        "torch.save, zip False": lambda content: torch.load(io.BytesIO(content), weights_only=False),
    }
    for name, content in found.items():
        if not name.startswith("pickle") and name not in careless:
            continue
        result = careless.get(name, pickle.loads)(content)
        if isinstance(result, subprocess.Popen):
            result.wait()
        assert (tmp_path / "sings").exists(), name
        (tmp_path / "sings").unlink()


# what is written


@pytest.fixture(scope="module")
def objects_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects") / "output"
    data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    settings = {"batch_size": 4, "progress_bar": False, "device": "cpu", "num_epochs": 2}
    Trainer(nn.Linear(4, 2), TrainingConfig(output_dir=folder, **settings), data, data).train()
    return folder


@pytest.fixture(scope="module")
def config_run(tmp_path_factory: pytest.TempPathFactory, mnist_project: Path, train: Callable) -> Path:
    folder = tmp_path_factory.mktemp("config") / "output"
    quick = ("train.train_epoch=0", "train.train_iter=4", "train.checkpointer.period=2", "train.eval_period=2")
    train(mnist_project / "configs" / "config.py", *quick, f"train.output_dir={folder}", cwd=folder.parent)
    return folder


def is_pickle(content: bytes) -> bool:
    if zipfile.is_zipfile(io.BytesIO(content)) or b"PK\x03\x04" in content[:64]:
        return True
    try:
        return bool(list(pickletools.genops(content)))  # read to its end, and not run
    except Exception:  # what it raises for other files is not written down
        return False


def bytes_in(tree: Any) -> Iterator[bytes]:
    """What a state holds as bytes."""
    if isinstance(tree, dict) and "$bytes" in tree:
        import base64

        yield base64.b64decode(tree["$bytes"])
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from bytes_in(child)


@pytest.mark.parametrize("api", ["objects_run", "config_run"])
@pytest.mark.slow
def test_nothing_that_a_run_writes_is_a_pickle(api: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(api)
    looked_at = set()
    for path in folder.rglob("*"):
        if not path.is_file() or path.name.startswith("events.out.tfevents."):  # TensorBoard's own format
            continue
        looked_at.add(path.suffix)
        assert path.suffix in (".json", ".yaml", ".txt", ".csv", ".md", ".safetensors", ""), path
        assert not is_pickle(path.read_bytes()), path
        if path.suffix == ".json" and path.name != "metrics.json":
            assert not any(is_pickle(content) for content in bytes_in(json.loads(path.read_bytes()))), path
    assert {".json", ".yaml", ".safetensors", ".txt"} <= looked_at


def test_a_pickle_would_be_noticed(canary: Path) -> None:
    for name, content in payloads(canary).items():
        assert is_pickle(content) == name.startswith(("pickle", "torch.save"))
    assert is_pickle(pickle.dumps([1, 2, 3]))
    assert is_pickle(pickle.dumps("x", 0))


# what is read


FILES = ("model.safetensors", "optimizer.json", "optimizer.safetensors", "lr_scheduler.json", "extra.json")


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("place", [*FILES, "manifest.json", "last_checkpoint"])
def test_a_checkpoint_runs_nothing(place: str, payload: str, signed: bool, tmp_path: Path, canary: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checkpointer = Checkpointer(model, tmp_path, optimizer=optimizer, lr_scheduler=schedule)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.wait()
    folder, content = tmp_path / "model_0000001", payloads(canary)[payload]
    if place == "last_checkpoint":
        (tmp_path / place).write_bytes(content)
    else:
        put(folder, place, content, signed=signed)

    readers: list[Callable[[], object]] = [
        lambda: Checkpointer(model, tmp_path).load(folder, checkpointables=[]),
        lambda: checkpointer.load(folder),
        lambda: checkpointer.resume_or_load(""),
        lambda: verify(folder, deep=True),
    ]
    for read in readers:
        if place in FILES and signed:  # a state of another object, in JSON, is detected by the object that loads it
            expected_error: Any = contextlib.suppress(UserError, KeyError, TypeError, ValueError, AttributeError)
        elif place == "last_checkpoint":
            expected_error = contextlib.nullcontext()  # loads the newest, which is valid
        else:
            expected_error = pytest.raises(CheckpointError, match=re.escape(place))
        with expected_error:
            read()
    look_with_every_command(folder)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors", "weights.bin", "weights.pkl"])
def test_a_file_of_weights_runs_nothing(name: str, payload: str, tmp_path: Path, canary: Path) -> None:
    (tmp_path / name).write_bytes(payloads(canary)[payload])
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=name):
        Checkpointer(model).load(tmp_path / name, checkpointables=[])
    assert torch.equal(model.weight, before)


# configurations that are data

TAGS = {
    "apply": '!!python/object/apply:os.system ["touch {canary}"]',
    "new": '!!python/object/new:os.system ["touch {canary}"]',
    "popen": '!!python/object/apply:subprocess.Popen [["touch", "{canary}"]]',
    "eval": "!!python/object/apply:eval [\"__import__('os').system('touch {canary}')\"]",
    "name": "!!python/name:os.system ''",
    "module": "!!python/module:os ''",
    "a full tag": '!<tag:yaml.org,2002:python/object/apply:os.system> ["touch {canary}"]',
}
CALLS = {
    target: json.dumps({"_target_": target, **arguments})
    for target, arguments in {
        "os.system": {"command": "touch {canary}"},
        "posix.system": {"command": "touch {canary}"},
        "torch.os.system": {"command": "touch {canary}"},
        "trainwright.config.lazy.serialization.os.system": {"command": "touch {canary}"},
        "subprocess.run": {"args": ["touch", "{canary}"]},
        "subprocess.Popen": {"args": ["touch", "{canary}"]},
        "builtins.eval": {"source": "__import__('os').system('touch {canary}')"},
        "builtins.exec": {"object": "__import__('os').system('touch {canary}')"},
        "torch.load": {"f": "{canary}.pt", "weights_only": False},
        "torch.hub.load": {"repo_or_dir": "{canary}", "model": "x", "source": "local"},
        "pathlib.Path.touch": {"self": "{canary}"},
        "hydra.utils.instantiate": {"config": {"_target_": "os.system", "command": "touch {canary}"}},
    }.items()
}
MODEL = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2}
PLACES = (
    "model",
    "model.bias",
    "optim",
    "dataloader",
    "dataloader.train",
    "train.scheduler",
    "train.evaluation.evaluator",
)


def yaml_with(place: str, text: str) -> str:
    """A configuration as YAML, with ``text`` at a key."""
    node: dict[str, Any] = {"model": dict(MODEL), "dataloader": {"train": dict(MODEL)}}
    parent = node
    *above, last = place.split(".")
    for key in above:
        parent = parent.setdefault(key, {})
    parent[last] = "PUT_IT_HERE"
    return json.dumps(node).replace('"PUT_IT_HERE"', text)


@pytest.fixture
def in_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("evil", [*TAGS, *CALLS])
def test_a_config_yaml_runs_nothing(
    evil: str, place: str, in_project: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {**TAGS, **CALLS}[evil].replace("{canary}", str(canary))
    canary.with_name("sings.pt").write_bytes(payloads(canary)["torch.save, zip True"])
    (in_project / "config.yaml").write_text(yaml_with(place, text))
    assert main(["train", "config.yaml", f"train.output_dir={in_project / 'output'}"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "config.yaml" in said
    assert not (in_project / "output" / "log.txt").exists()


@pytest.mark.parametrize("evil", [*TAGS, *CALLS, "pickle 4", "torch.save, zip True"])
def test_a_training_config_yaml_runs_nothing(evil: str, tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "training_config.yaml"
    if evil in (*TAGS, *CALLS):
        path.write_text("optimizer: " + {**TAGS, **CALLS}[evil].replace("{canary}", str(canary)))
    else:
        path.write_bytes(payloads(canary)[evil])
    with pytest.raises(UserError):
        TrainingConfig.load_from_yaml(path)


@pytest.fixture
def resolver(canary: Path) -> Iterator[str]:
    """A resolver of the user's program that data must not reach."""
    OmegaConf.register_new_resolver("evil", lambda *_: canary.touch() or "done")
    yield "${evil:x}"
    OmegaConf.clear_resolver("evil")


TRICKS = (
    "${{evil:x}}",
    "a${{evil:x}}b",
    "${{oc.select:nothing,${{evil:x}}}}",
    "${{oc.select:nothing,{{_target_:os.system,command:'touch {canary}'}}}}",
    "${{oc.env:PATH}}",
    "${{oc.env:NOT_THERE,${{evil:x}}}}",
    "${{oc.create:{{_target_:os.system,command:'touch {canary}'}}}}",
    "${{oc.decode:'${{evil:x}}'}}",
    "${{oc.deprecated:train.seed}}",
    "${{hydra:runtime.cwd}}",
    "${{${{evil:x}}}}",
    "${{eval:'1+1'}}",
)


@pytest.mark.exhaustive(every=4)
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("api", ["yaml", "override", "training_config"])
def test_an_interpolation_reads_other_keys_and_no_more(
    api: str, trick: str, resolver: str, tmp_path: Path, canary: Path
) -> None:
    text = trick.format(canary=canary)
    path = tmp_path / "config.yaml"
    if api == "override":
        with pytest.raises(UserError):
            LazyConfig.apply_overrides(OmegaConf.create({"train": {"output_dir": "x"}}), [f'train.output_dir="{text}"'])
    elif api == "yaml":
        path.write_text(yaml.safe_dump({"train": {"output_dir": text}}))
        with pytest.raises(UserError):
            LazyConfig.load(path)
    else:
        path.write_text(yaml.safe_dump({"output_dir": text}))
        with pytest.raises(UserError):
            TrainingConfig.load_from_yaml(path)


OVERRIDES = (
    "train.output_dir=__import__('os').system('touch {canary}')",
    "train.output_dir=\"__import__('os').system('touch {canary}')\"",
    "train.output_dir=$(touch {canary})",
    "'train.output_dir=`touch {canary}`'",
    "train.output_dir=eval(touch)",
    "train.output_dir=exec('touch {canary}')",
    "train.output_dir=shuffle(1,2)",
    "train.output_dir=!!python/object/apply:os.system",
    "train.output_dir={{_target_:os.system,command:'touch {canary}'}}",
    "train.output_dir={{{{7*7}}}}",
    "+train.x=lambda:0",
    "hydra.run.dir={canary}",
    "hydra/launcher=basic",
    "__class__.__init__=1",
    "train.__class__=1",
    "train._content=1",
    "train._metadata.ref_type=1",
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_is_parsed_and_never_run(override: str, canary: Path) -> None:
    cfg = OmegaConf.create({"train": {"output_dir": "x", "seed": 1}, "model": dict(MODEL)})
    try:
        LazyConfig.apply_overrides(cfg, [override.format(canary=canary)])
    except UserError:
        assert cfg.train.output_dir == "x"
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert type(cfg).__name__ == "DictConfig"
    assert isinstance(plain["train"]["output_dir"], str | dict)  # the text itself, or what may not be called
    assert plain["train"]["seed"] == 1


# names cannot lead out of the folder

OUTSIDE = ("../x", "/tmp/x", "a/b", "a\\b", "..", ".", "", ".hidden", "a\0b", "last_checkpoint", "x/../../y")


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    checkpointer = Checkpointer(nn.Linear(1, 1), folder)
    checkpointer.save("good", iteration=1)
    checkpointer.wait()
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: checkpointer.save(name, iteration=2),
        lambda: checkpointer.tag_last_checkpoint(name),
        lambda: checkpointer.add_checkpointable(name, nn.Linear(1, 1)),
    ):
        with pytest.raises(CheckpointError, match="checkpoint name"):
            use()
    checkpointer.wait()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_prefix_that_leads_out_is_refused_before_the_training(name: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(nn.Linear(1, 1), tmp_path)
    with pytest.raises(ConfigError, match=r"PeriodicCheckpointer\.file_prefix"):
        PeriodicCheckpointer(checkpointer, 10, file_prefix=name)
    with pytest.raises(ConfigError, match=r"BestCheckpointer\.file_prefix"):
        BestCheckpointer(10, checkpointer, "Acc@1", file_prefix=name)
    PeriodicCheckpointer(checkpointer, 10, file_prefix="net")
    BestCheckpointer(10, checkpointer, "Acc@1", file_prefix="net_best")

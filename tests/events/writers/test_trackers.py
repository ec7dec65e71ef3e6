"""Experiment trackers get each iteration of a run once, also after a crash and a resume."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from trainwright import Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.events import EventStorage
from trainwright.events.writers.trackers import RECORD_NAME, TRACKERS, Tracker, unique_names


class Service(Tracker):
    """A tracker whose service is a dict: the rows of each run."""

    name = "json"  # a package that is always there
    runs: dict[str, list[tuple[int, dict[str, float]]]]

    def begin_run(self, run_id: str | None) -> str:
        if run_id is None:
            run_id = f"run {len(self.runs)}"
            self.runs[run_id] = []
        return run_id

    def send(self, rows: Mapping[int, dict[str, float]]) -> None:
        self.runs[self.run_id].extend(rows.items())

    def end_run(self, run_id: str) -> None:
        self.runs[run_id].append((-1, {}))


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    Service.runs = {}


def train(folder: Path, start: int, stop: int, *, killed: bool = False) -> None:
    """The metrics of iterations ``start`` to ``stop``."""
    writer = Service(folder)
    with EventStorage(start) as storage:
        for iteration in range(start, stop):
            storage.iter = iteration
            storage.put_scalar("loss", float(iteration), smoothing_hint=False)
            writer.write()
    if not killed:
        writer.close()
        writer.close()


def test_a_resumed_run_continues_the_run_of_the_tracker_and_repeats_nothing(tmp_path: Path) -> None:
    train(tmp_path, 0, 7, killed=True)
    train(tmp_path, 4, 9)  # resumed from a checkpoint after 4 iterations
    assert Service.runs == {"run 0": [*((i, {"loss": float(i)}) for i in range(9)), (-1, {})]}
    assert json.loads((tmp_path / RECORD_NAME).read_bytes())["json"] == {"id": "run 0", "last_iteration": 8}


def test_a_resumed_run_sends_what_the_tracker_lost(tmp_path: Path) -> None:
    train(tmp_path, 0, 3, killed=True)
    lines = [{"iteration": i, "loss": float(i) if i != 4 else None} for i in range(6)]
    (tmp_path / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"itera')
    train(tmp_path, 6, 8)
    expected = [(i, {"loss": float(i)} if i != 4 else {}) for i in range(8)]
    assert Service.runs == {"run 0": [*expected, (-1, {})]}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"json": 3}'])
def test_a_record_that_is_not_ours_begins_a_new_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RECORD_NAME).write_bytes(content)
    train(tmp_path, 4, 6)
    train(tmp_path, 0, 2)  # from the start: a new run too
    assert [[iteration for iteration, _ in rows] for rows in Service.runs.values()] == [[4, 5, -1], [0, 1, -1]]


ODD_NAMES = [
    *(["acc@1", "acc_1", "/lead", "trail/", "a//b", "../up", "..", "100%", "精度", "@"]),
    "a b",
    "a\nb",
    "x" * 300,
    "",
]


@pytest.mark.exhaustive
def test_names_that_mlflow_refuses_are_changed_and_stay_apart() -> None:
    validation = pytest.importorskip("mlflow.utils.validation", reason="pip install 'trainwright[trackers]'")
    names = unique_names(ODD_NAMES, TRACKERS["mlflow"].allowed_name)
    assert len(set(names.values())) == len(ODD_NAMES)
    for name in names.values():
        validation._validate_metric(name, 1.0, 0, 0)
    assert names["acc_1"] == "acc_1"  # and acc@1, which comes first, is acc_1_2
    assert [names["acc@1"], names["a//b"], names["/lead"], names["精度"]] == ["acc_1_2", "a/b", "lead", "精度"]


@pytest.mark.parametrize(
    ("tracker", "names", "expected"),
    [
        ("wandb", ("_step", "step", "loss/val", "_"), ("step_2", "step", "loss/val", "metric")),
        (
            "trackio",
            ("time", "step", "Run", "__a", "loss"),
            ("iter_time", "metric_step", "metric_Run", "metric___a", "loss"),
        ),
    ],
)
def test_names_of_a_tracker_itself_are_changed(tracker: str, names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    found = unique_names(names, TRACKERS[tracker].allowed_name)
    assert tuple(found[name] for name in names) == expected


def test_a_resumed_run_keeps_changed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "allowed_name", staticmethod(lambda name: name.replace("@", "_")))
    for start, names in ((0, ("acc@1", "acc_1")), (1, ("acc_1", "acc@1", "acc#1"))):
        writer = Service(tmp_path)
        with EventStorage(start) as storage:
            storage.put_scalars(**{name: float(number) for number, name in enumerate(names)})
            writer.write()
        writer.close()
    (rows,) = Service.runs.values()
    first, second = ({"acc_1_2": 0.0, "acc_1": 1.0}, {"acc_1": 0.0, "acc_1_2": 1.0, "acc#1": 2.0})
    assert rows == [(0, first), (-1, {}), (1, second), (-1, {})]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("wandb", {"wandb": {}}),
        (["wandb", "mlflow"], {"wandb": {}, "mlflow": {}}),
        ({"wandb": None, "trackio": {"project": "digits"}}, {"wandb": {}, "trackio": {"project": "digits"}}),
        ([], None),
        (False, None),
        (None, None),
    ],
    ids=str,
)
def test_trackers_are_names_or_arguments(given: Any, meant: Any) -> None:
    assert TrainingConfig(output_dir="run", trackers=given).trackers == meant
    for wrong in ("wandbb", {"wandb": 3}, 7, ["mlflo"]):
        with pytest.raises(ConfigError, match=r"trackers.*(wandb|mlflow)"):
            TrainingConfig(output_dir="run", trackers=wrong)


def test_a_missing_package_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a))
    config = TrainingConfig(output_dir=tmp_path / "run", trackers="wandb", device_str="cpu", loss="CrossEntropyLoss")
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    trainer = Trainer(torch.nn.Linear(3, 2), config, train_dataset=data)
    with pytest.raises(ConfigError, match="pip install wandb"):
        trainer.train()
    assert trainer.state.global_step == 0


# A real run with all three services, killed and resumed.

PROGRAM = """
import json, os, signal, sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
os.environ |= {"TRACKIO_DIR": str(Path(sys.argv[1], "trackio")), "WANDB_SILENT": "true"}
import torch
from torch.utils.data import TensorDataset
from trainwright import Trainer, TrainingConfig
from trainwright.hooks import CallbackHook

folder, resume = Path(sys.argv[1]), sys.argv[2] == "resume"
torch.manual_seed(0)
x = torch.randn(64, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
config = TrainingConfig(
    output_dir=folder / "run", batch_size=8, num_epochs=3, log_steps=2, save_steps=5, loss="CrossEntropyLoss",
    metrics=["accuracy"], resume_from_checkpoint=resume, device_str="cpu",
    trackers={
        "wandb": {"project": "digits", "mode": "offline"},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "experiment": "digits"},
        "trackio": {"project": "digits"},
    },
)
trainer = Trainer(torch.nn.Linear(4, 2), config, train_dataset=data, eval_dataset=data)

def kill(trainer):
    if trainer.iter in (17, 23):  # when all three have the rows before
        record = folder / "run" / "trackers.json"
        deadline, sent = time.monotonic() + 100, []
        while len(sent) < 3 or min(sent) < trainer.iter - 2:
            if record.exists():
                sent = [one["last_iteration"] for one in json.loads(record.read_text()).values()]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if not resume:
            os.kill(os.getpid(), signal.SIGKILL)

trainer.register_hooks([CallbackHook(after_step=kill)])
trainer.train()
"""


# What each service has then: the steps of the loss and of the evaluation, and settings.
READER = """
import json, os, struct, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
folder = Path(sys.argv[1])
os.environ["TRACKIO_DIR"] = str(folder / "trackio")

def records(path):  # blocks of 32768 bytes, after a header of 7: parts of records with checksum, length and type
    from wandb.proto.wandb_internal_pb2 import Record
    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""

found, settings = {"total_loss": [], "eval_loss": []}, {}
paths = sorted((folder / "run" / "wandb").glob("offline-run*/*.wandb"))
ids = {path.stem for path in paths}
for path in paths[-1:]:  # the newest one is complete
    for record in records(path):
        if record.WhichOneof("record_type") == "run":
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if name in found:
                    found[name].append(record.history.step.num)
wandb = {"runs": len(ids), "steps": found, "batch_size": settings["batch_size"]}

from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
steps = {name: [m.step for m in client.get_metric_history(runs[0].info.run_id, name)] for name in found}
mlflow = {"runs": len(runs), "steps": steps, "batch_size": int(runs[0].data.params["batch_size"])}

from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("digits")
rows = SQLiteStorage.get_logs("digits", "run")
steps = {name: [row["step"] for row in rows if name in row] for name in found}
config = SQLiteStorage.get_run_config("digits", "run")
trackio = {"runs": len(runs), "steps": steps, "batch_size": config["batch_size"]}
print(json.dumps({"wandb": wandb, "mlflow": mlflow, "trackio": trackio}))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, run_python: Run) -> dict[str, Any]:
    for name in ("wandb", "mlflow", "trackio"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "reader.py").write_text(READER)
    run_python("program.py", folder, "kill", cwd=folder, code=-9, timeout=200)
    run_python("program.py", folder, "resume", cwd=folder, timeout=200)
    found: dict[str, Any] = json.loads(run_python("reader.py", folder, cwd=folder).stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_killed_and_resumed_run_is_one_run_with_single_steps(name: str, tracked: dict[str, Any]) -> None:
    found = tracked[name]
    assert found["runs"] == 1
    assert found["batch_size"] == 8
    assert found["steps"]["total_loss"] == [*range(1, 24, 2)]
    assert found["steps"]["eval_loss"] == [7, 15, 24]


def test_a_config_file_names_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.config_trainer.test_default_trainer import config
    from trainwright import DefaultTrainer

    monkeypatch.setitem(TRACKERS, "wandb", Service)
    trainer = DefaultTrainer(config(tmp_path, train_iter=3, trackers={"wandb": {"project": "digits"}}))
    trainer.train()
    assert [[iteration for iteration, _ in rows] for rows in Service.runs.values()] == [[0, 1, 2, 3, -1]]

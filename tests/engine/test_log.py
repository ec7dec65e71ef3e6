"""``trainer.log`` in methods, hooks and callbacks: what is recorded, by which mean, and where; in both APIs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.ranks import on_ranks
from tests.toys import Samples, file_config, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.dist import get_rank
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.data import build_image_test_loader
from trainwright.events.storage import NoEventStorageError
from trainwright.hooks import Callback, HookBase

SIZE, NUM = 4, 22  # the last batch of an epoch of the Python API is shorter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layer(inputs)
        return {"loss": F.cross_entropy(scores, labels), "prediction_scores": scores}


def data(length: int = NUM, seed: int = 1) -> Samples:
    inputs = torch.randn(length, 3, generator=torch.Generator().manual_seed(seed))
    return Samples(inputs=inputs, labels=(inputs[:, 0] > 0).long(), length=length)


class Logs(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.log({"mean_input": inputs["inputs"].mean(), "rows": len(inputs["labels"])})
        return super().compute_loss(model, inputs)

    def evaluation_step(self, batch: Any) -> Any:
        self.log({"seen": batch["inputs"].mean(), "rows": float(len(batch["labels"]))})
        return super().evaluation_step(batch)


class FileLogs(DefaultTrainer):
    def train_step(self, model: Any, inputs: Any) -> Any:
        self.log({"mean_input": inputs["inputs"].mean(), "rows": len(inputs["labels"])})
        outputs = model(**inputs)
        self.backward(outputs["loss"])
        self.step()
        self.zero_grad()
        return outputs


class InHook(HookBase):
    def before_step(self) -> None:
        self.trainer.log({"before": self.trainer.iter})

    def after_step(self) -> None:
        self.trainer.log({"after": torch.tensor([2.0 * self.trainer.iter])})


class InCallback(Callback):
    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.trainer.log({"begun": logs["global_step"]})

    def on_epoch_end(self, epochs: int, logs: Any) -> None:
        self.trainer.log({"epochs": epochs})

    def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
        self.trainer.log({"of_batch": batch["inputs"].mean()})


def python_api(folder: Path, accumulation: int = 1, kind: Any = Logs, **settings: Any) -> Any:
    config = quiet(
        folder, batch_size=SIZE, num_epochs=2, gradient_accumulation_steps=accumulation, dataloader_shuffle=False,
        metrics=[], log_steps=1, dataloader_drop_last=False, **settings,
    )  # fmt: skip
    return kind(Net(), config, data(), data(10, seed=2), callbacks=[InCallback()])


def config_files(folder: Path, accumulation: int = 1, kind: Any = FileLogs, **settings: Any) -> Any:
    cfg = file_config(
        folder, Net, data, train_micro_batch_size=SIZE, num_accumulation_steps=accumulation, train_iter=6,
        callbacks=[LazyCall(InCallback)()], log_period=1, **settings,
    )  # fmt: skip
    cfg.dataloader.test = [
        LazyCall(build_image_test_loader)(dataset=data(10, seed=2), test_batch_size=4, num_workers=0)
    ]
    cfg.train.evaluation.update(enabled=True, evaluator={"topk": [1]}, eval_period=100)
    cfg.train.input_placement_device = "cpu"
    return kind(cfg)


APIS = pytest.mark.parametrize("build", [python_api, config_files])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def expected_means(accumulation: int) -> list[float]:
    """Of the windows of the Python API: weighted by samples, as the loss is."""
    batches = [*torch.stack([s["inputs"] for s in (data()[i] for i in range(NUM))]).split(SIZE)] * 2
    per_epoch = len(batches) // 2
    epochs = [batches[:per_epoch], batches[per_epoch:]]
    windows = [epoch[at : at + accumulation] for epoch in epochs for at in range(0, per_epoch, accumulation)]
    return [float(torch.cat(window).mean()) for window in windows]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_values_of_a_step_are_means_over_its_micro_batches_weighted_as_the_loss(
    accumulation: int, tmp_path: Path
) -> None:
    trainer = python_api(tmp_path, accumulation)
    trainer.train()
    values = [value for value, _ in trainer.storage.history("mean_input").values()]
    assert values == pytest.approx(expected_means(accumulation), abs=1e-6)
    assert [at for _, at in trainer.storage.history("mean_input").values()] == [*range(len(values))]


@APIS
@pytest.mark.parametrize("accumulation", [1, 2])
def test_hooks_and_callbacks_log_in_both(build: Any, accumulation: int, tmp_path: Path) -> None:
    trainer = build(tmp_path, accumulation)
    trainer.register_hooks([InHook()])
    trainer.train()
    storage, end = trainer.storage, trainer.max_iter
    assert storage.history("before").values() == [(float(at), at) for at in range(end)]
    assert storage.history("after").values() == [(2.0 * at, at) for at in range(end)]
    assert len(storage.history("begun").values()) == end
    is_python = build is python_api
    assert storage.history("epochs").latest() == (2 if is_python or accumulation == 2 else 1)
    # The last batch of an epoch has 2 samples in the Python API.
    assert storage.history("rows").latest() == pytest.approx({1: 2, 2: 10 / 3}[accumulation] if is_python else SIZE)
    assert "mean_input" in storage.histories()
    if build is config_files and accumulation == 2:  # the mean over both micro-batches
        assert storage.history("begun").values()[1] == (2.5, 1)


@APIS
def test_two_values_of_an_update_under_one_name_are_refused(build: Any, tmp_path: Path) -> None:
    class AtEnd(Callback):
        def on_train_batch_end(self, batch: Any, logs: Any) -> None:
            self.trainer.log({"at_end": 1.0})

    single = build(tmp_path / "1")
    single.add_callback(AtEnd())
    single.train()
    assert len(single.storage.history("at_end").values()) == single.max_iter
    accumulated = build(tmp_path / "2", 2)
    accumulated.add_callback(AtEnd())
    with pytest.raises(ConfigError, match=r"'at_end' is logged in a micro-batch and in a hook or callback.*one value"):
        accumulated.train()


@APIS
def test_every_writer_of_files_gets_the_values(build: Any, tmp_path: Path) -> None:
    build(tmp_path).train()
    rows = rows_of(tmp_path)
    assert all("mean_input" in row for row in rows if "total_loss" in row and row["iteration"] < 6)
    if build is python_api:
        with (tmp_path / "metrics.csv").open() as file:
            assert {"mean_input", "eval_seen"} <= {*next(csv.reader(file))}


@APIS
@pytest.mark.parametrize("slot", [None, "evaluate"])
def test_writers_get_what_a_hook_logs_before_them_and_what_comes_later_warns(
    build: Any, slot: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter % 2:
                self.trainer.log({"odd": self.trainer.iter})

    hook = Odd()
    hook.slot = slot
    trainer = build(tmp_path)
    trainer.register_hooks([hook])
    trainer.train()
    written = [row["iteration"] for row in rows_of(tmp_path) if "odd" in row]
    warnings = [one for one in caplog.messages if "'odd'" in one and "no writer gets it" in one]
    assert (len(written), len(warnings)) == ((0, 1) if slot is None else (trainer.max_iter // 2, 0))


@APIS
def test_a_value_that_comes_when_all_are_written_warns(
    build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AtEnd(Callback):
        def on_train_end(self, logs: Any) -> None:
            self.trainer.log({"end": 1.0})

    trainer = build(tmp_path)
    trainer.add_callback(AtEnd())
    trainer.train()
    assert not any("end" in row for row in rows_of(tmp_path))
    assert any("'end'" in one and "no writer gets it" in one for one in caplog.messages)


@APIS
def test_values_of_an_evaluation_are_means_over_its_samples_with_a_prefix(build: Any, tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.train()
    inputs = torch.stack([data(10, seed=2)[i]["inputs"] for i in range(10)])
    stored, results = trainer.storage.latest(), trainer.last_eval_results
    assert results["of_batch"] == pytest.approx(float(inputs.mean()), abs=1e-6)  # the last batch is shorter
    assert stored["eval_of_batch"][0] == results["of_batch"]
    assert "of_batch" not in stored
    if build is python_api:
        assert stored["eval_seen"][0] == pytest.approx(float(inputs.mean()), abs=1e-6)
        assert stored["eval_rows"][0] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)
        assert trainer.evaluate()["seen"] == pytest.approx(float(inputs.mean()), abs=1e-6)


@APIS
def test_a_resumed_run_writes_the_rows_of_one_without_a_break(build: Any, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more: dict[str, Any] = {"save_steps": 3} if build is python_api else {"checkpointer": {"period": 3}}
    build(whole, **more).train()

    class Stops(HookBase):
        def after_step(self) -> None:
            if self.trainer.iter == 3:
                raise KeyboardInterrupt

    stopped = build(parts, **more)
    stopped.register_hooks([Stops()])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    build(parts, **more, **({"resume_from_checkpoint": True} if build is python_api else {"resume": True})).train()
    names = ("iteration", "mean_input", "rows", "begun", "eval_of_batch")
    kept = [[{n: row.get(n) for n in names} for row in rows_of(folder)] for folder in (whole, parts)]
    assert kept[0] == kept[1]


@APIS
def test_a_value_within_an_update_that_comes_later_counts_from_there(build: Any, tmp_path: Path) -> None:
    class Late(Logs if build is python_api else FileLogs):  # type: ignore[misc]
        calls = 0

        def train_step(self, model: Any, inputs: Any) -> Any:
            type(self).calls += 1
            if self.calls % 2 == 0:
                self.log({"late": self.calls})
            return super().train_step(model, inputs)

    trainer = build(tmp_path, 2, kind=Late)
    trainer.train()
    values = trainer.storage.history("late").values()
    assert values[:2] == [(2.0, 0), (4.0, 1)]


@APIS
@pytest.mark.parametrize(
    "values",
    [{"total_loss": 1.0}, {"loss": 1.0}, {"eval_loss": 1.0}, {"": 1.0}, {"x": torch.zeros(2)}, {"x": "high"}, 3],
)
def test_what_cannot_be_logged_is_refused(build: Any, values: Any, tmp_path: Path) -> None:
    class Wrong(HookBase):
        def after_step(self) -> None:
            self.trainer.log(values)

    trainer = build(tmp_path)
    trainer.register_hooks([Wrong()])
    with pytest.raises(ConfigError, match=r"^(trainer\.log|put_scalar\('x'\)): "):
        trainer.train()
    with pytest.raises(NoEventStorageError):
        trainer.log({"x": 1.0})


@pytest.mark.parametrize(("others", "options"), [((1.0,), {}), ((1.0,), {"prog_bar": True}), ((), {"on_epoch": True})])
def test_the_form_of_another_library_is_answered_with_the_line_to_write(
    others: Any, options: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigTypeError, match=r"trainer\.log: got 'hits' \(str\).*: trainer\.log\({'hits': value}\)"):
        python_api(tmp_path).log("hits", *others, **options)


class PartsOfLoss(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(inputs, labels)
        return outputs | {"digit_loss": outputs["loss"].detach()}


class InEvaluation(Callback):
    """Logs values at the begin and at the end of the batches of an evaluation, and keeps them with their weights."""

    def __init__(
        self, names: tuple[str, ...] = (), *, is_logged: Any = lambda number: True, at_end: bool = False
    ) -> None:
        self.names, self.is_logged, self.at_end = names, is_logged, at_end
        self.number, self.values = 0, list[tuple[float, int]]()

    def on_eval_batch_begin(self, batch: Any, logs: Any) -> None:
        if not self.at_end:
            self._log(batch)

    def on_eval_batch_end(self, batch: Any, logs: Any) -> None:
        if self.at_end:
            self._log(batch)
        self.number += 1

    def _log(self, batch: Any) -> None:
        if self.is_logged(self.number):
            value = float(batch["inputs"].mean())
            self.values.append((value, len(batch["labels"])))
            self.trainer.log(dict.fromkeys(self.names, value))

    def mean(self) -> float:
        return sum(value * size for value, size in self.values) / sum(size for _, size in self.values)


def trainer_of(build: Any, folder: Path, callback: Callback | None = None, *, model: Any = Net, **settings: Any) -> Any:
    """A trainer with a metric, which logs nothing but what ``callback`` does."""
    if build is python_api:
        config = quiet(folder, batch_size=SIZE, num_epochs=1, log_steps=1, **settings)
        trainer = Trainer(model(), config, data(), data(10, seed=2))
    else:
        settings = {"train_micro_batch_size": SIZE, "test_micro_batch_size": SIZE, "train_iter": 3, **settings}
        cfg = file_config(folder, model, data, log_period=1, **settings)
        cfg.dataloader.test = [LazyCall(build_image_test_loader)(dataset=data(10, seed=2), num_workers=0)]
        cfg.train.evaluation.update(enabled=True, evaluator={"topk": [1]}, eval_period=3)
        cfg.train.input_placement_device = "cpu"
        trainer = DefaultTrainer(cfg)
    if callback is not None:
        trainer.add_callback(callback)
    return trainer


@APIS
@pytest.mark.parametrize("at_end", [False, True])
def test_a_value_of_the_begin_and_of_the_end_of_a_batch_is_weighted_by_this_batch(
    build: Any, at_end: bool, tmp_path: Path
) -> None:
    class OfSome(InEvaluation):
        """Not in the second batch."""

    of_all = InEvaluation(("of_all",), at_end=at_end)
    of_some = OfSome(("of_some",), at_end=at_end, is_logged=lambda number: number != 1)
    trainer = trainer_of(build, tmp_path, of_all)
    trainer.add_callback(of_some)
    trainer.train()
    assert [size for _, size in of_all.values] == [4, 4, 2]
    assert [size for _, size in of_some.values] == [4, 2]
    assert trainer.last_eval_results["of_all"] == pytest.approx(of_all.mean())
    assert trainer.last_eval_results["of_some"] == pytest.approx(of_some.mean())


NAMES_OF_RESULTS = {python_api: ("digit_loss", "accuracy"), config_files: ("digit_loss", "Acc@1")}


@APIS
@pytest.mark.parametrize("place", [0, 1])
def test_the_name_of_a_result_of_an_evaluation_is_refused(build: Any, place: int, tmp_path: Path) -> None:
    name = NAMES_OF_RESULTS[build][place]
    trainer = trainer_of(build, tmp_path, InEvaluation((name,)), model=PartsOfLoss)
    with pytest.raises(ConfigError, match=f"trainer.log: '{name}' is logged in an evaluation.*a result of"):
        trainer.train()


@APIS
@pytest.mark.parametrize("name", ["epoch_metric", "step_loss", "global_step"])
def test_a_name_under_which_callbacks_read_something_else_is_refused(build: Any, name: str, tmp_path: Path) -> None:
    trainer = trainer_of(build, tmp_path, InEvaluation((name,)))
    with pytest.raises(ConfigError, match=f"'{name}' is logged in an evaluation.*eval_{name}"):
        trainer.train()


@pytest.mark.parametrize(
    ("build", "name", "source"),
    [
        (python_api, "digit_loss", "a value of the step"),
        (config_files, "digit_loss", "a value of the step"),
        (python_api, "accuracy", "a metric of the training"),
        (python_api, "eval_accuracy", "a result of the evaluation"),
    ],
)
@pytest.mark.parametrize("first", [0, 4])  # the second: after an evaluation
def test_a_name_of_what_a_training_records_is_refused(
    build: Any, name: str, source: str, first: int, tmp_path: Path
) -> None:
    class InTraining(Callback):
        def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
            if self.trainer.iter >= first:
                self.trainer.log({name: 1.0})

    more: dict[str, Any] = {"eval_strategy": "step", "eval_steps": 3} if build is python_api else {"train_iter": 6}
    trainer = trainer_of(build, tmp_path, InTraining(), model=PartsOfLoss, **more)
    source = "a value of the step" if first and name == "accuracy" else source
    with pytest.raises(ConfigError, match=f"trainer.log: '{name}' is logged in the training, and is also {source}"):
        trainer.train()


def test_callbacks_read_a_metric_and_no_part_of_the_loss_as_the_metric(tmp_path: Path) -> None:
    class Reads(Callback):
        def on_eval_end(self, logs: Any) -> None:
            self.metric, self.accuracy = logs["eval_epoch_metric"], logs["eval_accuracy"]

    trainer = trainer_of(python_api, tmp_path, reads := Reads(), model=PartsOfLoss)
    trainer.train()
    assert reads.metric == reads.accuracy != trainer.last_eval_results["digit_loss"]


def _logged_by_one_rank(folder: Path) -> list[Any]:
    """Rank 1 logs each of its batches, rank 0 its second, which is a shorter one."""
    found = []
    for build in (python_api, config_files):
        callback = InEvaluation(("some",), is_logged=lambda number: get_rank() == 1 or number == 1)
        trainer = trainer_of(build, folder / build.__name__, callback)
        trainer.train()
        stored = trainer.storage.latest()
        found.append((callback.values, trainer.last_eval_results["some"], "eval_some" in stored, "some" in stored))
    return found


def test_the_mean_of_an_evaluation_is_over_the_batches_and_ranks_that_log(tmp_path: Path) -> None:
    for first, second in zip(*on_ranks(_logged_by_one_rank, tmp_path), strict=True):
        values = first[0] + second[0]
        assert [len(first[0]), len(second[0])] == [1, 1]
        assert {size for _, size in values} == {2, 4}
        mean = sum(value * size for value, size in values) / sum(size for _, size in values)
        for _, result, has_prefix, is_plain in (first, second):
            assert result == pytest.approx(mean)
            assert (has_prefix, is_plain) == (True, False)


def _logged_on_ranks(folder: Path, accumulation: int) -> dict[str, Any]:
    class OfRank(Logs):
        def training_step(self, batch: Any) -> Any:
            self.log({"rank": float(get_rank())})
            if get_rank() == 0:
                self.log({"of_main": 1.0})
            return super().training_step(batch)

    trainer = python_api(folder, accumulation, kind=OfRank)
    trainer.train()
    histories = trainer.storage.histories()
    found = {name: histories[name].values() for name in ("mean_input", "rows", "rank")}
    return found | {"results": trainer.last_eval_results, "loss": histories["total_loss"].values()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_have_the_mean_over_the_samples_of_all(accumulation: int, tmp_path: Path) -> None:
    first, second = on_ranks(_logged_on_ranks, tmp_path, accumulation)
    assert first["mean_input"] == second["mean_input"]
    inputs = torch.stack([data()[i]["inputs"] for i in range(NUM)])
    size = 2 * SIZE * accumulation
    windows = [float(inputs[at : at + size].mean()) for at in range(0, NUM, size)]
    assert [v for v, _ in first["mean_input"]][: len(windows)] == pytest.approx(windows, abs=1e-6)
    assert first["rank"][0][0] == pytest.approx(0.5)
    evaluated = torch.stack([data(10, seed=2)[i]["inputs"] for i in range(10)])
    assert first["results"]["seen"] == pytest.approx(float(evaluated.mean()), abs=1e-6)
    assert first["results"] == second["results"]


class LogsInStep(HookBase):
    """Logs ``names`` in each iteration, before the best checkpoint is chosen."""

    slot = "step"

    def __init__(self, *names: str) -> None:
        self.names = names

    def after_step(self) -> None:
        self.trainer.log({name: float(self.trainer.iter) for name in self.names})


def _best_by(build: Any, name: str, **settings: Any) -> dict[str, Any]:
    if build is python_api:
        given = {"metric_for_best_model": name, "greater_is_better": True, "eval_strategy": "step", "eval_steps": 1}
        return {**given, "save_enabled": True, **settings}
    return {"evaluation": {"eval_metric": name, "eval_mode": "max"}, **settings}


@APIS
def test_a_value_that_only_a_hook_logs_may_choose_the_best_checkpoint(build: Any, tmp_path: Path) -> None:
    name = "eval_mine" if build is python_api else "mine"
    trainer = trainer_of(build, tmp_path, **_best_by(build, name))
    trainer.register_hooks([LogsInStep(name)])
    trainer.train()
    assert trainer.best_checkpoint is not None
    other = trainer_of(build, tmp_path / "other", **_best_by(build, name))
    other.register_hooks([LogsInStep("another")])
    with pytest.raises(ConfigError, match=r"the evaluation computed no 'mine', which selects a checkpoint"):
        other.train()
    assert other.iterations_done > 0


@pytest.mark.parametrize("place", ["loss", "evaluation_step"])
def test_a_value_that_only_a_loss_or_a_method_logs_may_be_monitored(place: str, tmp_path: Path) -> None:
    class OwnStep(Trainer):
        def evaluation_step(self, batch: Any) -> Any:
            self.log({"mine": 0.5})
            return super().evaluation_step(batch)

    def own_loss(scores: Any, labels: Tensor) -> Tensor:
        trainer.log({"mine": 0.5})
        return F.cross_entropy(scores, labels)

    kind, loss = (Trainer, own_loss) if place == "loss" else (OwnStep, None)
    early = {"monitor": "eval_mine", "mode": "max", "patience": 1}
    settings = quiet(
        tmp_path, batch_size=SIZE, num_epochs=3, early_stopping=early, save_enabled=True, metric_for_best_model="mine",
        greater_is_better=True, loss="CrossEntropyLoss",
    )  # fmt: skip
    inputs = torch.randn(NUM, 3)
    pairs = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    trainer = kind(nn.Linear(3, 2), settings, pairs, pairs, loss=loss)
    trainer.train()
    assert trainer.epoch == 2  # the second value is no better
    assert trainer.best_checkpoint is not None

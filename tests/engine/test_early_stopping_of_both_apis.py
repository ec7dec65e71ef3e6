"""``early_stopping`` of a TrainingConfig and ``train.early_stopping`` of a config file: one behaviour."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from tests.engine.test_callbacks_of_both_apis import At, Net
from tests.ranks import on_ranks
from tests.toys import file_config, points, quiet
from trainwright import DefaultTrainer, LazyCall, Trainer
from trainwright.base.errors import ConfigError, ConfigKeyError, ConfigTypeError
from trainwright.evaluation import ClsEvaluator
from trainwright.hooks import (
    Callback,
    EarlyStoppingCallback,
    ModelCheckpointCallback,
    PrintCallback,
    ProgressBarCallback,
    TensorBoardCallback,
)

APIS = ("Python", "config file")
MICRO, EPOCHS = 4, 8


def net() -> Net:
    return Net((4, 16, 2), seed=0)


def data() -> Any:
    return points(32)


def held_out() -> Any:
    return points(12, seed=3)


def made(api: str, folder: Path, early: Any, *, metric: str = "loss", evaluates: bool = True, **settings: Any) -> Any:
    """The evaluation of a config file that minimizes its loss, or with the accuracy that both have."""
    resume = settings.pop("resume", False)
    if api == "Python":
        config = quiet(
            folder, batch_size=MICRO, num_epochs=EPOCHS, learning_rate=1.0, optimizer="SGD", lr_scheduler=None,
            lr_scheduler_type=None, eval_strategy="epoch" if evaluates else "no", eval_batch_size=MICRO, seed=7,
            early_stopping=early, metric_for_best_model="accuracy" if metric == "Acc@1" else metric,
            resume_from_checkpoint=resume or None, save_enabled=True, **settings,
        )  # fmt: skip
        return Trainer(net(), config, data(), held_out() if evaluates else None)
    cfg = file_config(
        folder, net, data, held_out if evaluates else None, train_micro_batch_size=MICRO, train_epoch=EPOCHS, seed=7,
        test_micro_batch_size=MICRO, scheduler=LazyCall(lr_scheduler.ConstantLR)(factor=1.0),
        input_placement_device="cpu", early_stopping=early, resume=resume, **settings,
    )  # fmt: skip
    cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=1.0)
    cfg.train.evaluation.update(
        evaluator=LazyCall(ClsEvaluator)(topk=(1,)), eval_metric=metric, eval_after_n_epoch=1,
    )  # fmt: skip
    return DefaultTrainer(cfg)


def early_of(trainer: Any) -> EarlyStoppingCallback:
    return next(one for one in trainer.callbacks if isinstance(one, EarlyStoppingCallback))


def trained(folder: Path, api: str, early: Any, **settings: Any) -> tuple[int, Any]:
    trainer = made(api, folder / api, early, **settings)
    trainer.train()
    one = early_of(trainer)
    assert one.best is not None
    best = one.best / 100 if one.monitor == "eval_Acc@1" else one.best
    return trainer.iterations_done, (round(best, 6), one.wait, one.stopped_epoch, one.mode)


SETTINGS = [
    ({"patience": 2}, "loss"),
    ({"monitor": "eval_loss", "patience": 2, "mode": "min", "min_delta": 0.01}, "Acc@1"),
    ({"monitor": "epoch_loss", "patience": 1, "min_delta": 0.1}, "loss"),
    ({"patience": 2, "min_delta": 0.3}, "Acc@1"),
    ({}, "Acc@1"),
    ({"monitor": "epoch_loss", "patience": 1, "min_delta": 10.0, "start": 3}, "loss"),
    ({"monitor": "eval_loss", "patience": 2, "mode": "min", "min_delta": 10.0, "start": 2}, "loss"),
]


@pytest.mark.parametrize(("early", "metric"), SETTINGS)
def test_both_stop_at_the_same_iteration(tmp_path: Path, early: Any, metric: str) -> None:
    python = trained(tmp_path, "Python", early, metric=metric)
    if metric == "Acc@1" and "monitor" not in early:  # percent
        early = {**early, "min_delta": early.get("min_delta", 0.0) * 100}
    assert trained(tmp_path, "config file", early, metric=metric) == python
    assert python[0] < EPOCHS * 8


def test_both_stop_at_the_same_iteration_on_two_processes(tmp_path: Path) -> None:
    python, config = (on_ranks(trained, tmp_path, api, {"patience": 2}) for api in APIS)
    assert python == config
    assert python[0][0] < EPOCHS * 4


@pytest.mark.parametrize("api", APIS)
def test_a_stopped_run_stays_stopped_and_a_larger_patience_continues_it(
    tmp_path: Path, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "early_stopping" if api == "Python" else "train.early_stopping"
    with caplog.at_level(logging.INFO, "trainwright"):
        done, _ = trained(tmp_path, api, {"patience": 2})
    assert f"{name}=None turns it off" in caplog.text
    assert f"{name}=None trains it longer" in caplog.text
    caplog.clear()
    again = made(api, tmp_path / api, {"patience": 2}, resume=True)
    with caplog.at_level(logging.INFO, "trainwright"):
        again.train()
    assert again.iterations_done == done
    assert f"larger patience or {name}=None continues it" in caplog.text
    longer = made(api, tmp_path / api, {"patience": 3}, resume=True)
    longer.train()
    assert longer.iterations_done > done
    without = made(api, tmp_path / api, None, resume=True)
    without.train()
    assert without.iterations_done == EPOCHS * 8


@pytest.mark.parametrize("api", APIS)
def test_a_start_that_stays_stopped_leaves_the_rows_of_the_run(tmp_path: Path, api: str) -> None:
    found = {}
    for starts in (1, 3):
        folder = tmp_path / str(starts)
        for start in range(starts):
            made(api, folder, {"patience": 2}, resume=start > 0).train()
        longer = made(api, folder, None, resume=True)
        longer.train()
        found[starts] = [{k: v for k, v in row.items() if "time" not in k} for row in longer.history]
    assert found[3] == found[1]
    assert len(found[1]) >= EPOCHS


def rows_of_evaluations(folder: Path, api: str, *, resume: bool = False) -> list[int]:
    trainer = made(api, folder / api, None if resume else {"patience": 2}, resume=resume)
    trainer.train()
    name = "eval_loss" if api == "Python" else "loss"
    return [row["iteration"] for row in trainer.history if name in row or f"eval_{name}" in row]


@pytest.mark.parametrize("api", APIS)
def test_the_evaluation_that_stops_a_run_has_one_row_and_one_line(
    tmp_path: Path, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainwright")
    rows = rows_of_evaluations(tmp_path, api)
    assert rows == list(range(7, rows[-1] + 1, 8))
    assert len(rows) < EPOCHS
    lines = [line for line in caplog.messages if line.startswith("Evaluation  iteration")]
    assert len(lines) == (len(rows) if api == "Python" else 0)  # the lines of epochs show the results of a config file
    longer = rows_of_evaluations(tmp_path, api, resume=True)
    assert longer == [*range(7, EPOCHS * 8 - 1, 8), EPOCHS * 8]


def test_the_evaluation_that_stops_two_processes_has_one_row(tmp_path: Path) -> None:
    for api in APIS:
        for rows in on_ranks(rows_of_evaluations, tmp_path, api):
            assert rows == list(range(3, rows[-1] + 1, 4))


@pytest.mark.parametrize("api", APIS)
def test_a_resume_in_the_middle_counts_as_the_uninterrupted_run(tmp_path: Path, api: str) -> None:
    whole = trained(tmp_path / "whole", api, {"patience": 3})
    trainer = made(api, tmp_path / api, {"patience": 3})
    for flag, step in (("should_save", 18), ("error", 21)):
        trainer.add_callback(At(flag, step), singleton=False)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trained(tmp_path, api, {"patience": 3}, resume=True) == whole


@pytest.mark.parametrize("api", APIS)
def test_a_change_between_two_trainings_is_used(tmp_path: Path, api: str) -> None:
    trainer = made(api, tmp_path, {"patience": 2})
    trainer.train()
    done, settings = trainer.iterations_done, trainer.config if api == "Python" else trainer.cfg.train
    settings.early_stopping = None
    trainer.train()
    assert done < trainer.iterations_done == EPOCHS * 8
    assert not any(isinstance(one, EarlyStoppingCallback) for one in trainer.callbacks)


@pytest.mark.parametrize("api", APIS)
def test_an_own_callback_of_the_class_replaces_it(tmp_path: Path, api: str) -> None:
    trainer = made(api, tmp_path, {"patience": 2})
    own = EarlyStoppingCallback(None, "eval_loss", patience=5, mode="min")
    trainer.add_callback(own)
    trainer.train()
    assert [one for one in trainer.callbacks if isinstance(one, EarlyStoppingCallback)] == [own]


@pytest.mark.parametrize("api", APIS)
def test_what_it_cannot_watch_is_reported_by_the_name_of_the_setting(
    tmp_path: Path, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = "TrainingConfig.early_stopping" if api == "Python" else "train.early_stopping"
    with caplog.at_level(logging.WARNING, "trainwright"):
        made(api, tmp_path / "a", {"patience": 2}, evaluates=False).train()  # by the loss of the training
    assert "watches" not in caplog.text
    # Nothing computes the metric of the best model.
    with caplog.at_level(logging.WARNING, "trainwright"), contextlib.suppress(ConfigError):
        made(api, tmp_path / "c", {"patience": 2}, metric="Acc@1", evaluates=False).train()
    assert f"{where}: watches the result of an evaluation, but nothing is evaluated" in caplog.text
    assert ("eval_dataset" if api == "Python" else "dataloader.test") in caplog.text
    with pytest.raises(ConfigError, match=rf"{where}.*monitor='val_loss'.*eval_loss"):
        made(api, tmp_path / "b", {"monitor": "val_loss"}).train()
    with pytest.raises(ConfigError, match=rf"{where}\.patienc\b.*patience"):
        made(api, tmp_path / "d", {"patienc": 2})


class PutsLogs(Callback):
    def on_eval_end(self, logs: Any) -> None:
        logs["eval_mine"] = 0.5


@pytest.mark.parametrize("api", APIS)
def test_a_monitor_that_nothing_puts_is_refused_before_the_first_step(
    tmp_path: Path, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = "TrainingConfig.early_stopping" if api == "Python" else "train.early_stopping"
    for name, near in (("eval_los", "Did you mean 'eval_loss'?"), ("epoch_lss", "eval_loss")):
        trainer = made(api, tmp_path / name, {"monitor": name, "mode": "min"})
        with pytest.raises(ConfigKeyError, match=rf"{where}: got monitor='{name}'.*") as raised:
            trainer.train()
        assert near in str(raised.value)
        assert trainer.iterations_done == 0
    trainer = made(api, tmp_path / "e", None)
    trainer.add_callback(EarlyStoppingCallback(None, "eval_los", mode="min"))
    with pytest.raises(ConfigKeyError, match=r"EarlyStoppingCallback: got monitor='eval_los'.*'eval_loss'"):
        trainer.train()
    assert trainer.iterations_done == 0
    # A callback of the user's may put it, and a model returns losses of any name.
    trainer = made(api, tmp_path / "f", {"monitor": "eval_mine", "mode": "max", "patience": 2})
    trainer.add_callback(PutsLogs())
    with caplog.at_level(logging.WARNING, "trainwright"):
        trainer.train()
    assert 0 < trainer.iterations_done < EPOCHS * 8
    assert f"{where}: got monitor='eval_mine'" in caplog.text
    trainer = made(api, tmp_path / "g", {"monitor": "eval_loss_size", "mode": "min"})
    with pytest.raises(ConfigKeyError, match=r"there is no metric 'eval_loss_size'"):
        trainer.train()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_setting", [True, False])
def test_a_monitor_of_another_library_has_one_answer_of_the_setting_and_the_callback(
    is_setting: bool, api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trainer_of(name: str) -> Any:
        trainer = made(api, tmp_path / name, {"monitor": "val_loss", "mode": "min"} if is_setting else None)
        if not is_setting:
            trainer.add_callback(EarlyStoppingCallback(None, "val_loss", mode="min"))
        return trainer

    with pytest.raises(ConfigKeyError, match=r"got monitor='val_loss'.*'eval_loss'"):
        trainer_of("a").train()
    with_own_code = trainer_of("b")
    with_own_code.add_callback(PutsLogs())
    with pytest.raises(ConfigKeyError, match=r"there is no metric 'val_loss'.*eval_loss"):
        with_own_code.train()
    assert "got monitor='val_loss'" in caplog.text


def test_a_default_metric_that_no_evaluator_computes_is_an_error_in_a_config_file(tmp_path: Path) -> None:
    """Where the setting is there, the user has written it: a run that it never stops is no answer."""
    trainer = made("config file", tmp_path, {"patience": 2}, metric="Acc@1")
    trainer.test = lambda *arguments: {"other": 1.0}
    with pytest.raises(ConfigKeyError, match=r"eval_Acc@1"):
        trainer.train()


@pytest.mark.parametrize(
    ("monitor", "is_known"), [("eval_near/loss", True), ("eval_loss", True), ("eval_near/los", False)]
)
def test_a_monitor_of_one_of_several_data_sets(
    tmp_path: Path, monitor: str, is_known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = quiet(tmp_path, batch_size=MICRO, num_epochs=1, early_stopping={"monitor": monitor, "mode": "min"})
    trainer = Trainer(net(), config, data(), {"near": held_out(), "far": held_out()})
    if is_known:
        trainer.run.use_built_in_callbacks()
        assert "got monitor=" not in caplog.text
    else:
        with pytest.raises(ConfigKeyError, match=r"Did you mean 'eval_loss'\?"):
            trainer.run.use_built_in_callbacks()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("monitor", ["eval_loss", "epoch_loss"])
@pytest.mark.parametrize("stop", [None, 2, 3])
def test_the_first_evaluations_are_compared_but_not_counted_also_over_a_resume(
    api: str, monitor: str, stop: int | None, tmp_path: Path
) -> None:
    early = {"monitor": monitor, "mode": "min", "patience": 2, "min_delta": 10.0, "start": 3}  # no value is better
    if stop is not None:

        class Stops(Callback):
            def on_epoch_begin(self, epochs: int, logs: Any) -> None:
                if epochs == stop + 1:
                    raise KeyboardInterrupt

        first = made(api, tmp_path, early, **({} if api == "Python" else {"checkpointer": {"period": 8}}))
        first.add_callback(Stops())
        with pytest.raises(KeyboardInterrupt):
            first.train()
    trainer = made(api, tmp_path, early, resume=stop is not None)
    trainer.train()
    # The first value is the best, the second and third do not count, the fourth and fifth are no better.
    assert (early_of(trainer).stopped_epoch, early_of(trainer).seen, early_of(trainer).wait) == (5, 5, 2)


def test_a_start_that_is_no_number_of_evaluations_is_refused(tmp_path: Path) -> None:
    for api in APIS:
        with pytest.raises(ConfigError, match=r"early_stopping.*start"):
            made(api, tmp_path, {"monitor": "eval_loss", "start": -1})
    with pytest.raises(ConfigError, match=r"start: got 0\.5"):
        EarlyStoppingCallback(None, "eval_loss", mode="min", start=0.5)  # type: ignore[arg-type]


def test_the_arguments_of_other_libraries_are_answered_with_the_form_to_write() -> None:
    form = r"write EarlyStoppingCallback\(None, 'eval_loss', patience=3, mode='auto'\)"
    for arguments in (("eval_loss",), ("eval_loss", 0.0, 3), (3,), (3, "eval_loss")):
        with pytest.raises(ConfigTypeError, match=form):
            EarlyStoppingCallback(*arguments)
    for arguments, here in (
        ({"early_stopping_patience": 3}, "Here: patience"),
        ({"monitor": "eval_loss", "restore_best_weights": True}, "load_best_model_at_end"),
        ({"patienc": 3}, "Did you mean 'patience'"),
    ):
        with pytest.raises(ConfigTypeError, match=rf"there is no argument .*{here}.* [Ww]{form[1:]}"):
            EarlyStoppingCallback(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="monitor: got ''"):
        EarlyStoppingCallback(patience=3)
    for callback, needed, name, here in (
        (ModelCheckpointCallback, (None,), "save_top_k", "Here: a setting beside model_checkpoint"),
        (ModelCheckpointCallback, (None,), "every_n_epochs", "every_n_epoch'?"),
        (PrintCallback, (), "total_epochs", "Did you mean 'total_epoch_num'.*PrintCallback\\(total_epoch_num, "),
        (PrintCallback, (2,), "step_freqency", "Did you mean 'step_frequency'"),
        (ProgressBarCallback, (2, []), "train_dataloder", "Did you mean 'train_dataloader'"),
        (TensorBoardCallback, (None,), "logdir", "Did you mean 'log_dir'"),
    ):
        with pytest.raises(ConfigTypeError, match=rf"^{callback.__name__}: there is no argument '{name}'\. .*{here}"):
            callback(*needed, **{name: 1})
    assert EarlyStoppingCallback(monitor="eval_loss", patience=3, mode="auto").patience == 3

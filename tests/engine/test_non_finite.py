"""NaN and infinity planted into a run: found before anything is saved, in both APIs, under each policy."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import (
    Classifier,
    NanGradient,
    OwnStep,
    Samples,
    Stream,
    assert_equal_weights,
    file_config,
    points,
    quiet,
)
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig
from trainwright.base.errors import ConfigError
from trainwright.checkpoint import verify
from trainwright.data import CyclicSampler
from trainwright.engine import EagerTrainer
from trainwright.hooks import FiniteCheck, NonFiniteError
from trainwright.optim import get_default_optimizer_params


def data(bad_sample: int | None = None) -> Samples:
    samples = points(80)
    if bad_sample is not None:
        samples.named["inputs"][bad_sample, 2] = math.nan
    return samples


class Model(Classifier):
    """Spoils the ``spoils`` of its forward passes in training: its loss, or only its gradients."""

    def __init__(self, spoils: Sequence[int] = (), what: str = "loss", factor: float = 1) -> None:
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        super().__init__(body=body, is_scored=False)
        self.spoils, self.what, self.factor, self.passes = spoils, what, factor, 0

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        number, self.passes = self.passes, self.passes + 1
        loss = super().forward(inputs, labels)["loss"] * self.factor
        if number in self.spoils:
            loss = loss + math.nan if self.what == "loss" else NanGradient.apply(loss)
        return {"loss": loss}


Run = Callable[..., Any]


def config_files(
    folder: Path, model: nn.Module, *, clip: bool = True, accumulation: int = 1, lr: float = 1e-3, **train: Any
) -> Any:
    """20 iterations, a row each 5, a checkpoint each 4."""
    sizes = {"train_iter": 20, "train_micro_batch_size": 4, "num_accumulation_steps": accumulation}
    cfg = file_config(folder, lambda: model, data, log_period=5, checkpointer={"period": 4}, **sizes, **train)
    cfg.optim = LazyCall(torch.optim.AdamW)(lr=lr, **({"params": {"clip_grad_max_norm": 1.0}} if clip else {}))
    return DefaultTrainer(cfg)


def python_api(
    folder: Path,
    model: nn.Module,
    *,
    clip: bool = True,
    accumulation: int = 1,
    resume: bool = False,
    lr: float = 1e-3,
    **settings: Any,
) -> Any:
    """20 updates in one epoch, a row each 5, a checkpoint each 4."""
    groups = get_default_optimizer_params(model, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0) if clip else None
    periods = {"log_steps": 5 * accumulation, "save_steps": 4 * accumulation, "save_freq": 0}
    config = quiet(
        folder, num_epochs=accumulation, batch_size=4, gradient_accumulation_steps=accumulation,
        lr_scheduler_type="constant", resume_from_checkpoint=resume, **periods, **settings,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=lr)
    return Trainer(model, config, train_dataset=data(), optimizer=optimizer)


APIS = pytest.mark.parametrize("api", [config_files, python_api])
CLIPPED = pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])


def checkpoints(folder: Path) -> list[Path]:
    """One for each iteration: the last one is saved again after the end."""
    found = {path.parent.name.split("_")[-1].split("-")[-1]: path.parent for path in folder.rglob("manifest.json")}
    return [found[number] for number in sorted(found)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "teration" in r.getMessage()]


@pytest.mark.exhaustive(every=3)
@APIS
@pytest.mark.parametrize("bad", [0, 6, 7, 11, 19], ids="update {}".format)
@pytest.mark.slow
def test_a_bad_loss_stops_the_run_and_the_last_good_checkpoint_is_kept(tmp_path: Path, api: Run, bad: int) -> None:
    trainer = api(tmp_path, Model((bad,)))
    with pytest.raises(NonFiniteError, match=rf"Iteration {bad + 1}: .*loss is nan"):
        trainer.train()
    saved = checkpoints(tmp_path)
    assert len(saved) == bad // 4  # updates 3, 7, 11 ... are saved; that of the bad one is not
    for checkpoint in saved:
        verify(checkpoint)
    if saved:
        again = api(tmp_path, Model(), resume=True)
        assert again.start_iter == bad // 4 * 4
        again.train()
        assert all(parameter.isfinite().all() for parameter in again.model.parameters())


@APIS
def test_a_new_run_from_the_weights_of_a_stopped_one_trains_at_a_smaller_rate(tmp_path: Path, api: Run) -> None:
    with pytest.raises(NonFiniteError, match=r"A resume keeps the learning rate: .*\(init_weights_from; train\."):
        api(tmp_path / "first", Model((5,))).train()
    (saved,) = checkpoints(tmp_path / "first")
    resumed = api(tmp_path / "first", Model(), resume=True, lr=1e-4)
    assert [group["initial_lr"] for group in resumed.optimizer.param_groups] == [1e-3]
    weights = copy.deepcopy(resumed.model.state_dict())
    name = "load_weight" if api is config_files else "init_weights_from"
    again = api(tmp_path / "second", Model(), lr=1e-4, **{name: str(saved)})
    assert all(torch.equal(value, weights[key]) for key, value in again.model.state_dict().items())
    assert not again.optimizer.state
    assert again.start_iter == 0
    again.train()
    assert [group["initial_lr"] for group in again.optimizer.param_groups] == [1e-4]
    assert [saved.name for saved in checkpoints(tmp_path / "second")]


@pytest.mark.parametrize("is_file", [True, False], ids=["config file", "Python"])
def test_the_error_names_the_field_of_the_batch_that_has_nan_already(tmp_path: Path, is_file: bool) -> None:
    if is_file:
        trainer: Any = DefaultTrainer(file_config(tmp_path, Model, lambda: data(bad_sample=3), train_iter=10))
    else:
        trainer = Trainer(Model(), quiet(tmp_path, num_epochs=1, batch_size=8), data(bad_sample=3))
    with pytest.raises(
        NonFiniteError, match=r"Its first batch has NaN or infinity already, in inputs: unless .*look for"
    ):
        trainer.train()


class Nested(Model):
    """The inputs are inside of two dicts."""

    def forward(self, inputs: Any, mask: Any = None, labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(inputs["a"]["b"], labels)


class NestedSamples(torch.utils.data.Dataset[Any]):
    def __init__(self, bad_sample: int) -> None:
        self.samples = data(bad_sample)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {"inputs": {"a": {"b": sample["inputs"]}}, "mask": [torch.zeros(2)], "labels": sample["labels"]}


@pytest.mark.parametrize("is_file", [True, False], ids=["config file", "Python"])
def test_the_error_names_nan_in_a_later_micro_batch_and_inside_of_fields(tmp_path: Path, is_file: bool) -> None:
    if is_file:
        cfg = file_config(tmp_path, Nested, lambda: NestedSamples(20), train_iter=10, train_micro_batch_size=8)
        cfg.dataloader.train.sampler = LazyCall(CyclicSampler)(shuffle=False)
        cfg.train.num_accumulation_steps = 3
        trainer: Any = DefaultTrainer(cfg)
    else:
        settings = {"num_epochs": 1, "batch_size": 8, "gradient_accumulation_steps": 3, "dataloader_shuffle": False}
        trainer = Trainer(Nested(), quiet(tmp_path, **settings), NestedSamples(20))
    with pytest.raises(NonFiniteError, match=r"Its micro-batch 3 has NaN or infinity already, in inputs\.a\.b: unless"):
        trainer.train()


@APIS
def test_a_bad_loss_in_the_middle_of_an_accumulation_window_is_found(tmp_path: Path, api: Run) -> None:
    trainer = api(tmp_path, Model((3 * 3 + 1,)), accumulation=3)
    with pytest.raises(NonFiniteError, match=r"Iteration 4: .*loss is nan"):
        trainer.train()
    assert checkpoints(tmp_path) == []


@APIS
def test_bad_gradients_show_in_their_norm_where_they_are_clipped(tmp_path: Path, api: Run) -> None:
    trainer = api(tmp_path, Model((6,), "gradient"))
    with pytest.raises(NonFiniteError, match=r"Iterations? 7.*grad_norm is nan"):
        trainer.train()
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.exhaustive(every=9)
@APIS
@pytest.mark.parametrize("bad", [6, 7, 15, 19])
@pytest.mark.slow
def test_bad_gradients_without_clipping_are_found_before_a_save(tmp_path: Path, api: Run, bad: int) -> None:
    trainer = api(tmp_path, Model((bad,), "gradient"), clip=False)
    with pytest.raises(NonFiniteError, match=r"parameters \(.*\) are not finite"):
        trainer.train()
    saved = checkpoints(tmp_path)
    assert len(saved) == bad // 4
    good = Model()
    again = api(tmp_path / "again", good, clip=False)
    again.checkpointer.load(saved[-1])
    assert all(parameter.isfinite().all() for parameter in good.parameters())


@APIS
def test_a_user_who_saves_finds_it_too(tmp_path: Path, api: Run) -> None:
    trainer = api(tmp_path, Model((1,), "gradient"), clip=False)

    class Saves(FiniteCheck):
        def after_step(self) -> None:
            if self.trainer.iter == 2:
                self.trainer.checkpointer.save("mine", iteration=2)

    trainer.register_hooks([Saves()])
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert checkpoints(tmp_path) == []


@pytest.mark.exhaustive(every=2)
@APIS
def test_warn_goes_on_to_the_end_and_saves(tmp_path: Path, api: Run, caplog: pytest.LogCaptureFixture) -> None:
    trainer = api(tmp_path, Model((6, 7)), non_finite="warn")
    trainer.train()
    assert trainer.iter == 20
    assert [line[:17] for line in warnings_of(caplog)] == ["Iterations 7-8: t"]
    assert len(checkpoints(tmp_path)) == 5


@pytest.mark.exhaustive(every=9)
@APIS
@CLIPPED
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.slow
def test_skip_leaves_out_that_update_tells_it_and_saves(
    tmp_path: Path, api: Run, clip: bool, what: str, caplog: pytest.LogCaptureFixture, read_rows: Any
) -> None:
    before: dict[str, Tensor] = {}
    model = Model((0, 6, 19), what)
    trainer = api(tmp_path, model, clip=clip, non_finite="skip")

    class Unchanged(FiniteCheck):
        """Holds weights, statistics and optimizer state of bad updates against those before."""

        def before_step(self) -> None:
            before.update(self._now())

        def after_step(self) -> None:
            now = self._now()
            is_same = all(torch.equal(now[name], before[name]) for name in before) and now.keys() == before.keys()
            assert is_same == (self.trainer.iter in (0, 6, 19)), self.trainer.iter

        def _now(self) -> dict[str, Tensor]:
            state = {name: value.clone() for name, value in model.state_dict().items() if "num_batches" not in name}
            for number, values in enumerate(trainer.optimizer.state.values()):
                state |= {f"{number}.{name}": value.clone() for name, value in values.items()}
            return state

        def check(self) -> None:
            pass

    trainer.register_hooks([Unchanged()])
    caplog.set_level(logging.INFO)
    trainer.train()
    (end,) = [message for message in caplog.messages if message.startswith("Finished after")]
    assert "Skipped  3 of 20 optimizer steps, whose loss or gradients were not finite\n" in end
    assert [line.partition(":")[0] for line in warnings_of(caplog)] == ["Iteration 1", "Iteration 7", "Iteration 20"]
    assert all("Skipped" in line for line in warnings_of(caplog))
    assert len(checkpoints(tmp_path)) == 5
    rows = {row["iteration"]: row for row in read_rows(tmp_path)}
    assert (rows[4]["skipped_update"], rows[19]["skipped_update"]) == (0.2, 0.15)  # of the last 20
    assert trainer.lr_scheduler.last_epoch == 20


@APIS
def test_rows_and_the_summary_show_the_part_of_the_updates_that_were_skipped(
    tmp_path: Path, api: Run, caplog: pytest.LogCaptureFixture, read_rows: Any
) -> None:
    caplog.set_level(logging.INFO)
    trainer = api(tmp_path, Model((7,)), non_finite="skip")
    trainer.train()
    assert [row["skipped_update"] for row in read_rows(tmp_path)] == [0.0, 0.1, pytest.approx(1 / 15), 0.05]
    assert "skipped_update 0.05" in next(text for text in caplog.messages if text.startswith("Finished after"))
    assert [value for value, _ in trainer.storage.history("skipped_update").values()].count(1.0) == 1


@APIS
@pytest.mark.exhaustive(every=2)
def test_a_run_that_skips_all_updates_says_so_at_its_end(
    tmp_path: Path, api: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api(tmp_path, Model(range(20)), non_finite="skip").train()
    assert "Skipped  20 of 20 optimizer steps" in caplog.text
    assert "not finite; no weight was changed\n" in caplog.text


@pytest.mark.exhaustive(every=2)
@APIS
def test_skip_in_an_accumulation_window_leaves_out_all_of_it(tmp_path: Path, api: Run) -> None:
    model = Model((3 * 3 + 1,), "gradient")
    trainer = api(tmp_path, model, accumulation=3, non_finite="skip")
    trainer.train()
    skipped = [iteration for value, iteration in trainer.storage.history("skipped_update").values() if value]
    assert skipped == [3]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.exhaustive(every=2)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_skip_leaves_out_a_bad_sample_in_each_epoch(tmp_path: Path, graph: bool) -> None:
    """With a fused optimizer, which nobody waits for."""
    settings = {"train_iter": 40, "train_micro_batch_size": 4, "non_finite": "skip"}
    cfg = file_config(tmp_path, Model, LazyCall(data)(bad_sample=7), **settings)
    cfg.optim.fused = True
    cfg.graph = {"enabled": graph, "backend": "aot_eager"}
    trainer = DefaultTrainer(cfg)
    trainer.train()
    values = [value for value, _ in trainer.storage.history("skipped_update").values()]
    assert (sum(values[:20]), sum(values[20:])) == (1, 1)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_an_own_step_that_skips_nothing_is_not_said_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Trainer):
        def optimization_step(self) -> None:
            self.optimizer.zero_grad()

    Own(Model((6,)), quiet(tmp_path, num_epochs=1, batch_size=4, non_finite="skip"), train_dataset=data()).train()
    without_step, bad_loss = warnings_of(caplog)
    assert "Training continues, with weights that may be invalid. Samples of update 7: " in bad_loss
    assert "made no optimizer step in 20 iterations" in without_step


def test_an_infinite_norm_under_a_gradient_scaler_is_its_own_affair(tmp_path: Path) -> None:
    model = Model(factor=1000)
    groups = get_default_optimizer_params(model, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0)
    batches = [{"inputs": torch.randn(4, 4), "labels": torch.randint(2, (4,))} for _ in range(3)]
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # too large: the first gradients overflow
    trainer = EagerTrainer(model, batches, torch.optim.SGD(groups, lr=0.1), grad_scaler=scaler)
    trainer.register_hooks([FiniteCheck(period=1)])
    trainer.train(0, 20)
    assert not math.isfinite(trainer.storage.history("grad_norm").values()[0][0])
    assert math.isfinite(trainer.storage.history("grad_norm").latest())


def test_an_unknown_policy_is_refused_in_both_apis(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TrainingConfig\.non_finite: got 'halt'.*'stop', 'skip' or 'warn'"):
        TrainingConfig(non_finite="halt")
    with pytest.raises(ConfigError, match=r"train\.non_finite.*'halt'"):
        config_files(tmp_path, Model(), non_finite="halt")


class Tagger(nn.Module):
    """Classes of inputs, with the mean over the labels that are not -100 as its loss."""

    def __init__(self, *, counts: bool = False, spoils: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.counts, self.spoils = nn.Linear(4, 2), counts, spoils

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.layer(inputs)
        if labels is None:
            return {"logits": scores}
        is_counted = labels != -100
        if self.spoils and not is_counted.any():
            scores = NanGradient.apply(scores)
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "logits": scores} | ({"num_tokens": is_counted.sum()} if self.counts else {})


def tagged(api: str, folder: Path, model: nn.Module, labels: Tensor, **settings: Any) -> Any:
    """Ten updates of two samples. The labels of the third and the sixth are all ignored."""
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    rows = Samples(inputs=inputs, labels=labels)
    if api == "config file":
        cfg = file_config(folder, lambda: model, lambda: rows, train_iter=10, train_micro_batch_size=2, **settings)
        cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        trainer: Any = DefaultTrainer(cfg)
    else:
        own = {"loss": "CrossEntropyLoss"} if api == "criterion" else {}
        plain = {"lr_scheduler_type": "constant", "batch_size": 2, "num_epochs": 1}
        config = quiet(folder, optimizer="SGD", learning_rate=0.1, max_grad_norm=None, **plain, **own, **settings)
        trainer = Trainer(model, config, TensorDataset(inputs, labels) if api == "criterion" else rows)
    for update in (3, 6):
        labels[trainer.sample_ids(update)[0]] = -100
    trainer.inputs = inputs
    return trainer


@pytest.mark.parametrize("policy", ["stop", "warn"])
@pytest.mark.parametrize(("api", "counts"), [("criterion", False), *product(("model", "config file"), (False, True))])
def test_updates_whose_labels_are_all_ignored_change_nothing_and_cause_one_warning(
    api: str, counts: bool, policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2) if api == "criterion" else Tagger(counts=counts)
    layer: Any = copy.deepcopy(model if api == "criterion" else model.layer)
    labels = torch.arange(20) % 2
    trainer = tagged(api, tmp_path, model, labels, non_finite=policy)
    trainer.train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for update in range(1, 11):
        (ids,) = trainer.sample_ids(update)
        if update in (3, 6):
            assert (labels[ids] == -100).all()
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(trainer.inputs[ids]), labels[ids]).backward()
        optimizer.step()
    trained = trainer.model if api == "criterion" else trainer.model.layer
    assert_equal_weights(trained, layer)
    (text,) = [text for text in warnings_of(caplog) if "is nan" in text]
    assert text.startswith("Iterations 3, 6: the loss is nan, as none of the labels counts")


@pytest.mark.parametrize("api", ["model", "config file"])
@pytest.mark.parametrize("counts", [False, True])
def test_labels_that_are_all_ignored_excuse_no_weight_that_is_nan(api: str, counts: bool, tmp_path: Path) -> None:
    trainer = tagged(api, tmp_path, Tagger(counts=counts, spoils=True), torch.arange(20) % 2)
    with pytest.raises(NonFiniteError, match=r"Now \d parameters .* are not finite"):
        trainer.train()


def over_unknown_order(api: str, data: str, folder: Path, model: nn.Module, kind: Any = None, **settings: Any) -> Any:
    """Ten updates of two samples, whose batches cannot be read again. The labels of the third are all ignored."""
    labels = (torch.arange(20) % 2).index_fill(0, torch.arange(4, 6), -100)
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    rows = Samples(inputs=inputs, labels=labels)
    stream = Stream([rows[number] for number in range(20)])
    if api == "config file":
        cfg = file_config(folder, lambda: model, lambda: stream, train_iter=10, train_micro_batch_size=2, **settings)
        cfg._set_flag("allow_objects", True)
        if data == "own loader":
            cfg.dataloader.train = DataLoader(rows, 2)
        cfg.optim = LazyCall(torch.optim.SGD)(params={}, lr=0.1)
        cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0)
        return (kind or DefaultTrainer)(cfg)
    plain = {"optimizer": "SGD", "learning_rate": 0.1, "max_grad_norm": None, "batch_size": 2, "max_steps": 10}
    given = {"train_dataloader": DataLoader(rows, 2)} if data == "own loader" else {"train_dataset": stream}
    return (kind or Trainer)(model, quiet(folder, **plain, **settings), **given)


class OwnFileStep(DefaultTrainer):
    def train_step(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
        loss = model(**inputs)["loss"]
        self.backward(loss)
        self.step()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("data", ["stream", "own loader"])
@pytest.mark.parametrize(
    ("api", "kind"), [("model", None), ("model", OwnStep), ("config file", None), ("config file", OwnFileStep)]
)
def test_labels_that_are_all_ignored_are_counted_where_no_batch_can_be_read_again(
    api: str, kind: Any, data: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known, unknown = Tagger(counts=True), Tagger()
    over_unknown_order(api, data, tmp_path / "known", known).train()
    caplog.clear()
    trainer = over_unknown_order(api, data, tmp_path / "unknown", unknown, kind)
    trainer.train()
    assert trainer.iterations_done == 10
    (text,) = [text for text in warnings_of(caplog) if "is nan" in text]
    assert text.startswith("Iteration 3: the loss is nan, as none of the labels counts")
    assert_equal_weights(unknown, known)


@pytest.mark.parametrize("data", ["stream", "own loader"])
def test_a_loss_of_nan_is_an_error_where_labels_count_that_cannot_be_read_again(data: str, tmp_path: Path) -> None:
    class Broken(Tagger):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            outputs = super().forward(inputs, labels)
            return outputs | {"loss": outputs["loss"] * (1 if self.training and (labels == -100).all() else math.nan)}

    trainer = over_unknown_order("model", data, tmp_path, Broken())
    with pytest.raises(NonFiniteError, match=r"Iterations? 1"):
        trainer.train()


def test_the_error_of_a_step_of_the_users_own_over_a_stream_asks_for_the_number_of_labels(tmp_path: Path) -> None:
    class Own(Trainer):
        def train_step(self, model: nn.Module, inputs: Any) -> dict[str, Tensor]:
            loss = model(**inputs)["loss"]
            loss.backward()
            return {"step_loss": loss}

    trainer = over_unknown_order("model", "stream", tmp_path, Tagger(), Own)
    with pytest.raises(NonFiniteError, match=r"Iteration 3: total_loss is nan.*ignored, let the model.*num_tokens"):
        trainer.train()

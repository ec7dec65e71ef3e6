"""The trainer of configurations: what it builds, keeps and refuses."""

import json
import multiprocessing
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.toys import Classifier, Results, Samples, file_config, points
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.base.errors import ConfigError, ConfigTypeError, MissingFileError
from trainwright.config.yaml_file import regular_file
from trainwright.data import CyclicSampler, SingleRoundSampler
from trainwright.evaluation import DatasetEvaluator
from trainwright.hooks import HookBase, ReduceOnPlateau


def data(length: int = 32, seed: int = 0) -> Samples:
    return points(length, 2, seed)


class Model(Classifier):
    def __init__(self, width: int = 4, vocab_size: int = 0) -> None:
        super().__init__((2, width, 2), dropout=0.1)
        self.vocab_size = vocab_size


def config(folder: Path, **train: Any) -> DictConfig:
    given = {"train_iter": 6, "train_micro_batch_size": 8, "log_period": 1, **train}
    cfg = file_config(folder, Model, data, LazyCall(data)(seed=1), **given)
    cfg.train.evaluation.evaluator.topk = (1,)
    return cfg


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def test_the_configuration_given_is_not_changed(tmp_path: Path) -> None:
    cfg = config(tmp_path, train_epoch=2, train_iter=0)
    before = str(cfg)
    trainer = DefaultTrainer(cfg)
    assert str(cfg) == before
    assert (trainer.cfg.train.train_iter, trainer.cfg.train.global_batch_size) == (8, 8)


@pytest.mark.usefixtures("forked_workers")
def test_workers_end_with_the_training_and_start_again_with_the_next(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    for loader in (cfg.dataloader.train, cfg.dataloader.test[0]):
        loader.num_workers = 1
    trainer = DefaultTrainer(cfg)
    for end in (6, 9):
        trainer.train(max_iter=end)
        assert not multiprocessing.active_children()
    trainer.test(trainer.cfg, trainer.test_loader, trainer.model)
    trainer.test_loader[0].close()  # torch waits 5 s for a worker that the garbage collector ends
    assert trainer.iterations_done == 9


def test_epochs_alone_decide_how_long_a_run_is_unless_iterations_are_set_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    cfg = config(tmp_path)
    cfg.train = get_config("common/train.py").train
    cfg.train.update({"output_dir": str(tmp_path), "train_epoch": 3, "train_micro_batch_size": 8})
    assert DefaultTrainer(cfg).max_iter == 12
    assert not [r for r in caplog.records if "both set" in r.getMessage()]
    cfg.train.train_iter = 10
    assert DefaultTrainer(cfg).max_iter == 12
    (line,) = [r.getMessage() for r in caplog.records if "both set" in r.getMessage()]
    assert "train.train_iter=10 and train.train_epoch=3 (12 iterations)" in line


def test_a_schedule_that_needs_a_metric_is_refused_without_evaluations(tmp_path: Path) -> None:
    cfg = config(tmp_path, scheduler=LazyCall(ReduceLROnPlateau)())
    cfg.train.evaluation.enabled = False
    with pytest.raises(ConfigError, match="stepped with a metric, and no hook does so"):
        DefaultTrainer(cfg).train()


class Scores(DatasetEvaluator):
    """Gives the scores of the test one after the other."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)

    def process(self, inputs: Any, outputs: Any) -> None: ...

    def evaluate(self) -> dict[str, float]:
        return {"score": self.values.pop(0)}


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("scores", [[1.0, 1.0, 2.0, 1.0], [4.0, 3.0, 3.0, 5.0]])
def test_a_plateau_is_that_of_the_metric_of_the_best_checkpoint(mode: str, scores: list[float], tmp_path: Path) -> None:
    scheduler = LazyCall(ReduceLROnPlateau)(mode=mode, patience=0, factor=0.5)

    def build(iterations: int, values: list[float], **train: Any) -> DefaultTrainer:
        cfg = config(tmp_path, scheduler=scheduler, train_iter=iterations, **train)
        evaluation = {"eval_period": 1, "eval_metric": "score", "eval_mode": mode}
        cfg.train.evaluation.update({**evaluation, "evaluator": LazyCall(Scores)(values=values)})
        cfg.optim.lr = 1.0
        return DefaultTrainer(cfg)

    build(2, scores[:2]).train()
    resumed = build(4, scores[2:], resume=True)
    resumed.train()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    expected = ReduceLROnPlateau(optimizer, mode, patience=0, factor=0.5)
    for score in scores:
        expected.step(score)
    assert resumed.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1.0


def test_a_plateau_in_the_other_direction_than_that_of_the_metric_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, scheduler=LazyCall(ReduceLROnPlateau)(patience=0))
    with pytest.raises(ConfigError, match=r"mode='min', and the best Acc@1 is the maximum\. Write mode='max'"):
        DefaultTrainer(cfg).train()


class StepsTwice(HookBase):
    uses_results = True

    def after_step(self) -> None:
        if self.trainer.iter % 2:
            self.trainer.lr_scheduler.step(1.0)


@pytest.mark.parametrize("hook", [lambda: ReduceOnPlateau(lambda: 1.0, period=2), StepsTwice])
def test_a_plateau_that_a_hook_of_the_users_steps_is_left_to_it(hook: Any, tmp_path: Path) -> None:
    cfg = config(tmp_path, scheduler=LazyCall(ReduceLROnPlateau)(patience=0, factor=0.5), train_iter=4)
    cfg.train.evaluation.eval_period = 1
    cfg.optim.lr = 1.0
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([hook()])
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5  # two steps


def test_a_plateau_is_not_stepped_by_a_result_of_an_earlier_evaluation(tmp_path: Path) -> None:
    class Seldom(Scores):
        def evaluate(self) -> dict[str, float]:
            return super().evaluate() if len(self.values) > 3 else {"other": 1.0}

    cfg = config(tmp_path, scheduler=LazyCall(ReduceLROnPlateau)(mode="max", patience=0, factor=0.5), train_iter=4)
    evaluation = {"eval_period": 1, "eval_metric": "score", "eval_mode": "max"}
    cfg.train.evaluation.update({**evaluation, "evaluator": LazyCall(Seldom)(values=[1.0] * 5)})
    cfg.optim.lr = 1.0
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5  # two results in four evaluations


def test_every_build_method_may_be_overridden(tmp_path: Path) -> None:
    built: list[str] = []

    def noting(name: str) -> Any:
        inherited = getattr(DefaultTrainer, name).__func__

        def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
            built.append(name)
            return inherited(cls, *args, **kwargs)

        return build

    static = [
        "build_tokenizer", "build_model", "build_optimizer", "build_lr_scheduler", "build_train_loader",
        "build_test_loader", "build_evaluator", "auto_scale_hyperparams", "get_batch", "test", "build_graph",
    ]  # fmt: skip
    own = type("Own", (DefaultTrainer,), {name: classmethod(noting(name)) for name in static})
    cfg = config(tmp_path)
    cfg.graph.enabled, cfg.graph.backend = True, "aot_eager"
    own(cfg).train()
    assert set(built) == set(static)


@pytest.mark.slow
def test_several_test_sets_are_named_by_class_and_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path)
    cfg.dataloader.test = [cfg.dataloader.test[0], cfg.dataloader.test[0]]
    with caplog.at_level("INFO", "trainwright"):
        assert set(DefaultTrainer(cfg).train()) == {"Samples", "Samples_2"}
    assert any(re.match("E.*  Samples/Acc@1 .*  Samples_2/Acc@1 ", message) for message in caplog.messages)
    assert {"Samples/Acc@1", "Samples_2/Acc@1"} <= set(rows(tmp_path)[-1])


def test_mixup_of_the_loader_is_applied_to_images_and_labels() -> None:
    batch = {"images": torch.ones(2, 3), "labels": torch.tensor([0, 1], dtype=torch.int32)}
    mixed = DefaultTrainer.get_batch(batch, "cpu", lambda images, labels: (images * 2, labels + 1))
    assert mixed["images"].eq(2).all()
    assert mixed["labels"].tolist() == [1, 2]
    assert mixed["labels"].dtype is torch.int64


def test_a_vocabulary_is_padded_for_the_model(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.model.vocab_size = 100
    cfg.tokenization = {"tokenizer": LazyCall(Tokenizer)(), "make_vocab_size_divisible_by": 64}
    assert DefaultTrainer(cfg).model.vocab_size == 128


class Tokenizer:
    def padded_vocab_size(self, multiple: int) -> int:
        return -(-100 // multiple) * multiple


def test_torchs_own_schedules_and_a_scheduler_in_epochs_of_milestones(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.StepLR)(step_size=2, gamma=0.5)
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert [row["lr"] for row in rows(tmp_path)[:6]] == pytest.approx([1e-4 * 0.5 ** (i // 2) for i in range(6)])

    cfg = config(tmp_path / "other")
    cfg.train.scheduler = LazyCall("trainwright.optim.WarmupMultiStepLR")(
        milestones=[0.5], gamma=0.1, warmup_factor=1.0, warmup_method="linear"
    )
    DefaultTrainer(cfg).train()
    assert [row["lr"] for row in rows(tmp_path / "other")[:6]] == pytest.approx([1e-4] * 3 + [1e-5] * 3)


def test_an_argument_that_a_schedule_lacks_is_named_without_those_that_the_run_sets(tmp_path: Path) -> None:
    cfg = config(tmp_path, scheduler=LazyCall("trainwright.optim.WarmupStepLR")(gamma=0.1))
    with pytest.raises(ConfigTypeError) as caught:
        DefaultTrainer(cfg)
    assert str(caught.value).endswith("optim.WarmupStepLR needs step_size: write step_size=... in its call.")


@pytest.mark.parametrize(
    ("milestones", "changes", "text", "level"),
    [
        ([2, 3], {}, "For epochs 2 and 3 of 4 write milestones=[0.5, 0.75].", "WARNING"),
        ([0.05, 0.1], {}, None, ""),  # iterations 2 and 4
        ([2, 3], {"train_iter": 40, "train_epoch": 0}, None, ""),
        ([2, 3], {"early_stopping": {"patience": 2}}, None, ""),  # train_epoch may be a limit
        ([60, 80], {}, "milestones=[60, 80], which this run does not reach: it steps it 40 times", "INFO"),
    ],
)
def test_milestones_that_are_no_iterations_of_the_run_are_named(
    milestones: Any, changes: dict[str, Any], text: str | None, level: str, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("INFO", "trainwright")
    schedule = LazyCall("trainwright.optim.WarmupMultiStepLR")(milestones=milestones)
    cfg = config(tmp_path, **{"train_micro_batch_size": 8, "train_epoch": 4, "train_iter": 0, **changes})
    cfg.dataloader.train.dataset = LazyCall(data)(length=80)
    cfg.train.scheduler = schedule
    trainer = DefaultTrainer(cfg)
    trainer.run.check_schedules()
    found = [record for record in caplog.records if record.name == "trainwright.optim"]
    assert [(record.levelname, text in record.getMessage()) for record in found] == ([(level, True)] if text else [])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"eval_period": 1}, "train.evaluation.eval_period=1 counts iterations (10 in an epoch). To count epochs write"
         " train.evaluation.eval_after_n_epoch=1."),
        ({"eval_period": 1, "checkpointer.period": 1}, "train.evaluation.eval_period=1 and train.checkpointer.period=1"
         " count iterations (10 in an epoch). To count epochs write train.evaluation.eval_after_n_epoch=1 and"
         " train.checkpointer.save_model_after_n_epoch=1."),
        ({"eval_period": 2}, None),  # five in an epoch
        ({"eval_period": 0.1}, None),
        ({"eval_period": 1, "train_epoch": 1}, None),  # once
        ({"eval_period": 1, "train_iter": 30, "train_epoch": 0}, None),
        ({"eval_period": 1, "evaluation.eval_after_n_epoch": 1}, None),
        ({"eval_period": 1, "evaluation.enabled": False}, None),
        ({"eval_period": 1, "train_micro_batch_size": 10}, None),  # a short epoch
        ({"eval_period": 1, "fast_dev_run": True}, None),
    ],
)  # fmt: skip
def test_a_period_that_may_be_meant_in_epochs_is_a_warning(
    changes: dict[str, Any], text: str | None, tmp_path: Path, caplog: Any
) -> None:
    cfg = config(tmp_path, train_micro_batch_size=8, train_epoch=2, train_iter=0)
    cfg.dataloader.train.dataset = LazyCall(data)(length=80)
    for key, value in changes.items():
        OmegaConf.update(cfg.train, key, value)
    trainer = DefaultTrainer(cfg)
    trainer.train(max_iter=1)
    trainer.train()
    assert [one for one in caplog.messages if "iterations (" in one] == ([text] if text else [])


SAMPLERS = {
    "a lazy call": LazyCall(CyclicSampler)(shuffle=False),
    "a partial": LazyCall(CyclicSampler)(shuffle=False, _partial_=True),
    "a batch sampler of torch": LazyCall(BatchSampler)(
        sampler=LazyCall(SequentialSampler)(data_source=LazyCall(data)()), batch_size=8, drop_last=True
    ),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_in_a_configuration_gets_what_the_loader_knows(sampler: Any, tmp_path: Path) -> None:
    cfg = config(tmp_path, train_iter=2)
    cfg.dataloader.train.sampler = sampler
    trainer = DefaultTrainer(cfg)
    assert [*islice(trainer.train_loader.batch_sampler, 2)] == [[*range(8)], [*range(8, 16)]]
    trainer.train()


def test_a_sampler_of_an_evaluation_gets_what_the_loader_knows(tmp_path: Path) -> None:
    cfg = config(tmp_path, test_micro_batch_size=20)
    cfg.dataloader.test[0].sampler = LazyCall(SingleRoundSampler)(drop_last=True)
    loader = DefaultTrainer(cfg).test_loader[0]
    assert [len(batch) for batch in loader.batch_sampler] == [20]


def test_a_loader_of_torch_is_used_as_it_is(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    loader = DataLoader(data(), batch_size=8)
    cfg.dataloader.train = loader
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert trainer.train_loader is loader
    assert len(rows(tmp_path)) == 7


@pytest.mark.parametrize("asked", [False, True])
def test_mixed_precision_is_for_training_and_for_evaluation_only_if_asked(tmp_path: Path, asked: bool) -> None:
    trained, evaluated = set(), set()

    class Seen(Model):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            (trained if self.training else evaluated).add(self.body(inputs).dtype)
            return super().forward(inputs, labels)

    cfg = config(tmp_path, amp={"enabled": True, "evaluation": asked}, train_iter=4)
    cfg._set_flag("allow_objects", True)
    cfg.model, cfg.train.evaluation.eval_period = Seen(), 2
    trainer = DefaultTrainer(cfg)
    trainer.train()
    (predicted,) = {one["prediction_scores"].dtype for one in trainer.predict(iterate=True)}
    assert trained == {torch.bfloat16}
    assert evaluated == {predicted} == {torch.bfloat16 if asked else torch.float32}


def test_samples_are_counted_over_several_trainings(tmp_path: Path) -> None:
    trainer = DefaultTrainer(config(tmp_path))
    trainer.train(0, 2)
    trainer.train(2, 6)
    state = json.loads((tmp_path / "model_final" / "trainer.json").read_text())
    assert (state["iterations_done"], state["consumed_samples"]) == (6, 48)
    trainer.cfg.train.train_iter = 8
    trainer.train()
    assert (trainer.iterations_done, trainer.samples_done) == (8, 64)
    longer = DefaultTrainer(config(tmp_path / "longer", train_iter=8))
    longer.train()
    rates = [one.storage.history("lr").latest() for one in (trainer, longer)]
    assert rates[0] == rates[1]  # of a schedule of eight iterations


def test_another_optimizer_cannot_take_over_a_checkpoint(tmp_path: Path) -> None:
    DefaultTrainer(config(tmp_path)).train()
    cfg = config(tmp_path, train_iter=8, resume=True)
    cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1, params=dict(cfg.optim.params))
    cfg.optim.params.pop("_target_")
    with pytest.raises(ConfigError, match="optimizer AdamW; this run has SGD"):
        DefaultTrainer(cfg)


class Counting(HookBase):
    """Has a memory."""

    steps = 0

    def after_step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_resume_with_other_hooks_goes_on_and_lists_what_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = DefaultTrainer(config(tmp_path))
    first.register_hooks([Counting()])
    first.train()
    cfg = config(tmp_path, train_iter=8, resume=True)
    cfg.train.evaluation.enabled = False
    second, counting = DefaultTrainer(cfg), [Counting(), Counting()]
    second.register_hooks(counting)
    caplog.clear()
    second.train()
    assert second.iter == 8
    assert [hook.steps for hook in counting] == [8, 2]  # the second one is new
    (line,) = [r.getMessage() for r in caplog.records if "other hooks" in r.getMessage()]
    assert "not used: BestCheckpointer" in line
    assert "Hooks without saved state: Counting" in line


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": LazyCall(data)()}, ConfigTypeError, r"model: got Samples.*torch\.nn\.Module"),
        ({"model": {"width": 4}}, ConfigTypeError, r"model: has no _target_.*LazyCall\(Net\)"),
        ({"dataloader.train": None}, ConfigError, "dataloader.train: missing"),
        ({"dataloader.train": LazyCall(data)()}, ConfigTypeError, "got Samples, a data set; .*build_image_train"),
        (
            {"dataloader.train": LazyCall(DataLoader)(dataset=LazyCall(data)(), batch_size=4)},
            ConfigError,
            "its batches have 4 samples, and train.train_micro_batch_size=8",
        ),
        ({"train.evaluation.evaluator": LazyCall(data)()}, ConfigTypeError, "evaluator: got Samples"),
        ({"train.global_batch_size": 64}, ConfigError, "at most 32: .* or train.global_batch_size where that is set"),
        ({"train.train_micro_batch_size": 64}, ConfigError, "at most 32: set a smaller train.train_micro_batch_size"),
        ({"train.global_batch_size": 9}, ConfigError, "divisible"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_training(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    from omegaconf import OmegaConf

    cfg = config(tmp_path)
    for key, value in change.items():
        OmegaConf.update(cfg, key, value, merge=False)
    with pytest.raises(error, match=message):
        DefaultTrainer(cfg)


def test_an_optimizer_of_another_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    cfg, model = config(tmp_path), Model()
    cfg.model, cfg.optim = model, torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = DefaultTrainer(cfg)  # sections may be objects
    trainer.train()
    assert trainer.optimizer.param_groups[0]["initial_lr"] == 0.1
    cfg.model = Model()
    with pytest.raises(ConfigError, match="SGD holds none of the model's parameters"):
        DefaultTrainer(cfg).train()


@pytest.mark.parametrize(
    ("name", "made", "instead"),
    [
        ("optimizer", lambda trainer: torch.optim.SGD(trainer.model.parameters(), lr=0.1), "set cfg.optim before"),
        ("model", lambda trainer: Model(), "set cfg.model before"),
        ("train_loader", lambda trainer: DataLoader(data(), batch_size=8), "set cfg.dataloader.train before"),
    ],
)
def test_a_part_that_is_assigned_without_effect_is_refused(name: str, made: Any, instead: str, tmp_path: Path) -> None:
    trainer = DefaultTrainer(config(tmp_path))
    before = getattr(trainer, name)
    setattr(trainer, name, made(trainer))
    with pytest.raises(
        ConfigError, match=rf"{name} was assigned, without effect .* override build_{name}, or {instead}"
    ):
        trainer.train()
    assert trainer.iterations_done == 0
    setattr(trainer, name, before)
    trainer.train()


def test_a_run_folder_in_place_of_a_config_file_is_answered_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {}\n")
    with pytest.raises(ConfigError, match=r"this is a folder; .*Did you mean '.*config.yaml'"):
        regular_file(tmp_path)


def test_a_part_of_a_launchers_environment_is_an_error_that_says_what_to_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK expected, but not set\. .*for one process, unset WORLD_SIZE"):
        DefaultTrainer(config(tmp_path))


def test_a_setting_of_a_loader_that_another_key_sets_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(tmp_path)
    cfg.dataloader.train.train_batch_size = 16
    cfg.dataloader.test[0].test_batch_size = cfg.train.test_micro_batch_size  # the same
    DefaultTrainer(cfg)
    (warning,) = [r.getMessage() for r in caplog.records if "of a loader" in r.getMessage()]
    assert "train_batch_size=16" in warning
    assert "has no effect: train.train_micro_batch_size=8 sets it" in warning


@pytest.mark.parametrize("is_named", [False, True])
def test_a_cycle_that_is_shorter_than_the_run_is_refused_before_the_first_step(is_named: bool, tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.OneCycleLR)(max_lr=0.1, total_steps=4)
    if is_named:
        cfg.optim = {"all": LazyCall(torch.optim.SGD)(params={}, lr=0.1)}
        cfg.train.scheduler = {"all": cfg.train.scheduler}
    trainer = DefaultTrainer(cfg)
    with pytest.raises(ConfigError, match=r"total_steps=4, but this run steps it 6 times .* Set total_steps=6"):
        trainer.train()
    assert trainer.iterations_done == 0


def test_a_cycle_that_is_assigned_between_two_trainings_has_the_length_of_the_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DefaultTrainer(config(tmp_path))
    trainer.train(0, 2)
    trainer.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, 0.1, total_steps=4)
    trainer.train(2, 6)
    assert trainer.lr_scheduler.last_epoch == 4
    assert "this run steps it" not in caplog.text


def test_a_line_says_that_a_schedule_of_torch_is_stepped_after_each_iteration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    cfg = config(tmp_path)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.StepLR)(step_size=30)
    DefaultTrainer(cfg).train()
    assert any("StepLR is stepped after each iteration" in r.getMessage() for r in caplog.records)


def _decay(epoch: int) -> float:
    return 0.5**epoch


def test_a_function_of_epochs_is_a_warning_in_place_of_that_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    cfg = config(tmp_path, train_iter=60)
    cfg.train.scheduler = LazyCall(torch.optim.lr_scheduler.LambdaLR)(lr_lambda=_decay)
    DefaultTrainer(cfg).train()
    (line,) = [one for one in caplog.messages if one.startswith("LambdaLR")]
    assert "in 83 % of the 60 steps of this run (after each iteration)" in line


@pytest.mark.parametrize("resume", [False, True])
def test_a_first_step_that_fails_late_leaves_the_earlier_run_as_it_was(tmp_path: Path, resume: bool) -> None:
    """After the loss was measured and before the step was over: the optimizer raises."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            return 1 / 0 if self.fails else super().step(closure)

    class Own(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg: DictConfig, model: nn.Module) -> torch.optim.Optimizer:
            return Failing(model.parameters(), lr=0.1)

    Own(config(tmp_path)).train()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    Failing.fails = True
    with pytest.raises(ZeroDivisionError):
        Own(config(tmp_path, resume=resume, train_iter=9)).train()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("key", ["train.input_placement_device", "train.dist.device_type"])
def test_the_device_that_is_asked_for_is_the_one_that_is_set_up(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omegaconf import OmegaConf

    from trainwright.config_trainer import setup
    from trainwright.engine import default_setup

    asked: list[Any] = []
    real = setup.setup_dist_util
    monkeypatch.setattr(setup, "setup_dist_util", lambda sizes, **_: asked.append(sizes["device_type"]) or real(sizes))
    cfg = config(tmp_path)
    OmegaConf.update(cfg, key, "cpu")
    default_setup(cfg)
    DefaultTrainer(cfg)
    assert set(asked) == {"cpu"}


@pytest.mark.parametrize(("epochs", "ends"), [(1, [4, 7, 11, 14, 17]), (2, [7, 14])])
def test_evaluations_and_checkpoints_are_at_the_ends_of_epochs_also_within_an_iteration(
    tmp_path: Path, epochs: int, ends: list[int]
) -> None:
    cfg = config(tmp_path, train_iter=0, train_epoch=5, train_micro_batch_size=8)
    cfg.dataloader.train.dataset.length = 27  # 3.375 iterations
    cfg.train.evaluation.eval_after_n_epoch = cfg.train.checkpointer.save_model_after_n_epoch = epochs
    DefaultTrainer(cfg).train()
    evaluated = [row["iteration"] for row in rows(tmp_path) if "Acc@1" in row]
    assert evaluated == [*(end - 1 for end in ends if end < 17), 17]
    assert sorted(int(path.name[6:]) + 1 for path in tmp_path.glob("model_0*")) == ends


def test_a_value_of_the_model_and_a_result_of_one_name_are_two_values(tmp_path: Path) -> None:
    class Scored(Model):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            outputs = super().forward(inputs, labels)
            return {**outputs, "score": outputs["loss"] * 0 + 7} if self.training else outputs

    cfg = config(tmp_path, train_iter=4)
    cfg._set_flag("allow_objects", True)
    cfg.model = Scored()
    cfg.train.evaluation.update(
        evaluator=Results(score=[0.3, 0.2]), eval_metric="score", eval_mode="max", eval_period=2
    )
    trainer = DefaultTrainer(cfg)
    assert trainer.train() == {"score": 0.2}
    latest = trainer.storage.latest()
    assert (latest["score"][0], latest["eval_score"][0]) == (7, 0.2)
    assert (tmp_path / "model_best").is_dir()


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path, checkpointer={"period": 1, "max_to_keep": 2, "save_top_k": 2})
    cfg._set_flag("allow_objects", True)
    scores = Results(score=[0.3, 0.9, 0.5, 0.7, 0.1, 0.2])
    cfg.train.evaluation.update(evaluator=scores, eval_metric="score", eval_mode="max", eval_period=1)
    DefaultTrainer(cfg).train()
    best = ["model_best", "model_best_0000001", "model_best_0000003"]
    assert sorted(path.name for path in tmp_path.glob("model_[0b]*")) == ["model_0000004", "model_0000005", *best]
    assert (tmp_path / "model_best").resolve().name == "model_best_0000001"
    cfg.train.evaluation.enabled = False
    DefaultTrainer(cfg)
    assert "train.checkpointer.save_top_k=2 has no effect: nothing is evaluated" in caplog.text


def test_the_results_of_an_evaluation_are_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path, train_iter=0, train_epoch=2, log_period=1)
    cfg.train.evaluation.eval_period = 2
    with caplog.at_level("INFO"):
        trainer = DefaultTrainer(cfg)
        trainer.train()
    lines = [message.split()[0] for message in caplog.messages if re.match(r"[EI].* Acc@1 ", message)]
    per_epoch = trainer.max_iter // 2
    ends = [at % per_epoch == 0 for at in range(2, trainer.max_iter + 1, 2)]
    assert lines == ["Epoch" if is_end else "Evaluation" for is_end in ends]
    assert {*ends} == {False, True}


@pytest.mark.parametrize("has_average", [False, True])
def test_a_program_that_resumes_a_built_trainer_continues_at_the_next_sample(tmp_path: Path, has_average: bool) -> None:
    """``trainer = DefaultTrainer(cfg); trainer.resume_or_load(); trainer.train()``, without ``train.resume``."""

    def trainer(name: str) -> DefaultTrainer:
        cfg = config(tmp_path / name, ema={"decay": 0.9} if has_average else None)
        cfg.train.checkpointer.period = 1
        return DefaultTrainer(cfg)

    whole = trainer("whole")
    whole.train()
    trainer("cut").train(max_iter=3)  # within an epoch of 4 iterations
    resumed = trainer("cut")
    resumed.resume_or_load(resume=True)
    resumed.train()
    assert resumed.start_iter == resumed.iterations_done == 6
    losses = [
        [(row["iteration"], row["total_loss"]) for row in rows(tmp_path / name) if "total_loss" in row]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name])


def test_a_missing_path_of_initial_weights_is_reported_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"^train\.load_weight: /nowhere/model: there is no"):
        DefaultTrainer(config(tmp_path, load_weight="/nowhere/model"))
    python = TrainingConfig(output_dir=tmp_path / "python", init_weights_from="/nowhere/model")
    with pytest.raises(MissingFileError, match=r"^TrainingConfig\.init_weights_from: /nowhere/model: there is no"):
        Trainer(nn.Linear(2, 2), python, data()).train()


def test_a_misspelt_section_of_the_evaluation_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path)
    cfg.dataloader.tset = cfg.dataloader.pop("test")
    assert DefaultTrainer(cfg).test_loader == []
    assert caplog.text.count("There is no dataloader.test, so nothing is evaluated. Is dataloader.tset it?") == 1
    caplog.clear()
    cfg.dataloader.test = None  # and this is the user's choice
    DefaultTrainer(cfg)
    assert "dataloader.test" not in caplog.text


def test_the_form_of_lightning_cli_is_answered(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.model = {"class_path": "proj.Net", "init_args": {"width": 64}}
    with pytest.raises(ConfigError, match="write _target_, and the keys of init_args beside it"):
        DefaultTrainer(cfg)


def test_a_checkpoint_is_no_folder_of_a_run(tmp_path: Path) -> None:
    DefaultTrainer(config(tmp_path)).train()
    with pytest.raises(ConfigError, match=rf"model_final, a checkpoint; the folder of its run is {tmp_path}\."):
        DefaultTrainer(config(tmp_path / "model_final")).train()

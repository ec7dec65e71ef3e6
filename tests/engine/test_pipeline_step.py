"""Both APIs train, evaluate and predict with a model that is cut into pipeline stages, as one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.layout_runs import train, train_on_ranks
from tests.parallel.test_pipeline import VOCABULARY, build_gpt
from tests.ranks import on_ranks
from trainwright import Trainer, TrainingConfig
from trainwright.base.dist import get_rank
from trainwright.config import ConfigError
from trainwright.hooks import HookBase
from trainwright.hooks.callbacks import Callback
from trainwright.parallel.pipeline import pipeline_of


def samples(number: int = 22, length: int = 10) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(VOCABULARY, (number, length), generator=generator)
    return [{"token_ids": row, "labels": row} for row in rows]


class OwnLoss(Trainer):
    """Computes its loss itself, and once one that is not finite."""

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        logits = model(token_ids=inputs["token_ids"])["logits"]
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
        return loss * (float("nan") if self.iter == 2 else 1)


class Penalty(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return super().compute_loss(model, inputs) + 0.01 * sum(p.square().sum() for p in model.parameters())


def train_by_objects(
    folder: Path, kind: type[Trainer] = Trainer, number: int = 22, layers: int = 4, **settings: Any
) -> dict[str, Any]:
    settings = {"max_grad_norm": 0.5, "batch_size": 2, "num_epochs": 2, "gradient_accumulation_steps": 4, **settings}
    config = TrainingConfig(
        output_dir=str(folder), learning_rate=1e-2, save_enabled=False, log_steps=1, device_str="cpu",
        evaluate_with_generate=False, **settings,
    )  # fmt: skip
    trainer = kind(build_gpt(layers=layers), config, train_dataset=samples(number), eval_dataset=samples(7))
    results = trainer.train()
    names = ("total_loss", "grad_norm", "skipped_update", "accuracy")
    return {
        "history": {
            name: [value for value, _ in trainer.storage.history(name).values()]
            for name in names
            if name in trainer.storage.latest()
        },
        "results": results,
        "predictions": trainer.predict(samples(5))["logits"],
        "first batch": next(iter(trainer.predict(samples(5), iterate=True)))["logits"],
        "stages": getattr(pipeline_of(trainer.model), "layer_stages", None),
    }


# What changes a step, with how far values may differ: in bfloat16 gradients of tied weights are rounded apart.
CASES: dict[str, tuple[type[Trainer], dict[str, Any], float]] = {
    "plain": (Trainer, {}, 1e-5),
    "own loss, skipped updates": (OwnLoss, {"non_finite": "skip"}, 1e-5),
    "bfloat16": (Trainer, {"mixed_precision": "bf16"}, 2e-2),
    "unequal stages": (Trainer, {"custom_pipeline_stage_id": [0, 0, 0, 1]}, 1e-5),
    "recomputed": (Trainer, {"gradient_checkpointing": True, "max_grad_norm": None, "clip_grad_value": 0.01}, 1e-5),
}


def train_stages_by_objects(folder: Path) -> list[dict[str, Any]]:
    return [
        train_by_objects(folder / name, kind, **settings, pipeline_parallel_size=2)
        for name, (kind, settings, _) in CASES.items()
    ]


def test_objects_train_evaluate_and_predict_as_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(train_stages_by_objects, tmp_path / "stages", timeout=100)
    for name, runs in zip(CASES, zip(*ranks, strict=True), strict=True):
        kind, settings, tolerance = CASES[name]
        alone = train_by_objects(tmp_path / "alone" / name, kind, **settings)
        for run in runs:
            for key, values in alone["history"].items():
                assert run["history"][key] == pytest.approx(values, abs=tolerance, nan_ok=True), (name, key)
            assert run["results"] == pytest.approx(alone["results"], abs=tolerance), name
            assert run["stages"] == settings.get("custom_pipeline_stage_id", [0, 0, 1, 1]), name
            for key in ("predictions", "first batch"):
                torch.testing.assert_close(run[key], alone[key], atol=10 * tolerance, rtol=0)


class ReadsStorage(HookBase):
    """Keeps the iterations whose loss this process knows after each step."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def after_step(self) -> None:
        self.known.append(self.trainer.storage.latest().get("total_loss", (0.0, -1))[1])


class ReadsLogs(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        self.losses.append(logs["step_loss"])


def losses_at_log_lines(folder: Path) -> dict[str, Any]:
    """When this stage knows losses; ``callback``: one process has a callback that reads each of them."""
    found: dict[str, Any] = {}
    for name in ("hook", "callback"):
        config = TrainingConfig(
            output_dir=str(folder / name), num_epochs=2, batch_size=2, gradient_accumulation_steps=4, log_steps=16,
            save_enabled=False, metrics=None, eval_strategy="no", pipeline_parallel_size=2,
        )  # fmt: skip
        reads, callback = ReadsStorage(), ReadsLogs()
        callbacks = [callback] if name == "callback" and get_rank() == 0 else None
        trainer = Trainer(build_gpt(), config, samples(32), callbacks=callbacks)
        trainer.register_hooks([reads])
        trainer.train()
        found[name] = {
            "known": reads.known, "read": callback.losses,
            "history": [value for value, _ in trainer.storage.history("total_loss").values()],
        }  # fmt: skip
    return found


@pytest.mark.exhaustive
def test_losses_travel_between_stages_at_log_lines_or_when_something_reads_each(tmp_path: Path) -> None:
    first, last = on_ranks(losses_at_log_lines, tmp_path)
    assert first["hook"]["history"] == last["hook"]["history"] == first["callback"]["history"]
    assert len(first["hook"]["history"]) == 8
    assert first["hook"]["known"] == [-1, -1, -1, 3, 3, 3, 3, 7]
    assert last["hook"]["known"] == first["callback"]["known"] == [*range(8)]
    read = torch.tensor(first["callback"]["read"]).reshape(8, 4)
    torch.testing.assert_close(read.mean(dim=1), torch.tensor(first["hook"]["history"]), atol=1e-6, rtol=0)


class OwnStep(Trainer):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch)


class OwnUpdate(Trainer):
    def optimization_step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)  # of one stage
        super().optimization_step()


class AssignsUpdate(HookBase):
    """Replaces a method of the trainer after its first update."""

    def after_step(self) -> None:
        self.trainer.optimization_step = lambda: None


def refused(folder: Path) -> dict[str, str]:
    found = {}
    cases: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
        "step": (OwnStep, {}),
        "update": (OwnUpdate, {}),
        "graph": (Trainer, {"graph": True}),
        "generate": (Trainer, {"evaluate_with_generate": True}),
        "shuffled": (Trainer, {}),
        "assigned": (Trainer, {"save_enabled": False, "eval_strategy": "no"}),
        "optimizer": (Trainer, {"save_enabled": False, "eval_strategy": "no"}),
    }
    for name, (kind, settings) in cases.items():
        settings = {"pipeline_parallel_size": 2, "evaluate_with_generate": False, **settings}
        config = TrainingConfig(
            num_epochs=1, batch_size=2, gradient_accumulation_steps=4, output_dir=str(folder / name), **settings
        )
        try:
            if name == "shuffled":
                kind(build_gpt(), config, train_dataloader=torch.utils.data.DataLoader(samples(), shuffle=True))
            else:
                others = {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())} if name == "optimizer" else {}
                trainer = kind(build_gpt(), config, train_dataset=samples(), **others)
                if name == "assigned":
                    trainer.register_hooks([AssignsUpdate()])
                if name in ("assigned", "optimizer"):
                    trainer.train()
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_does_not_fit_a_pipeline_is_refused_before_the_first_step(tmp_path: Path) -> None:
    for found in on_ranks(refused, tmp_path):
        assert "OwnStep.training_step is overridden" in found["step"]
        assert "OwnUpdate.optimization_step is overridden" in found["update"]
        assert "gradients of its layers only" in found["update"]
        assert "Trainer.optimization_step is overridden" in found["assigned"]
        assert "TrainingConfig.graph" in found["graph"]
        assert "DataLoader shuffles by the random generator of its process" in found["shuffled"]
        assert "TrainingConfig.evaluate_with_generate" in found["generate"]
        assert "SGD holds none of the model's parameters" in found["optimizer"]


def fail_in_a_stage(folder: Path) -> None:
    model, calls = build_gpt(), []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("planted")

    model.blocks[-1].register_forward_pre_hook(fail)  # type: ignore[index, union-attr, operator]
    config = TrainingConfig(
        num_epochs=1, batch_size=2, gradient_accumulation_steps=4, output_dir=str(folder), pipeline_parallel_size=2,
        device_str="cpu", evaluate_with_generate=False,
    )  # fmt: skip
    Trainer(model, config, samples()).train()


def test_an_error_of_a_stage_names_it_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        on_ranks(fail_in_a_stage, tmp_path)
    last = str(raised.value).rpartition("ValueError: planted")[2]
    assert re.search(r"In pipeline stage 1 of stages 0 to 1 \(layers 2 to 3\), micro-batch \d of 4\.", last)


@pytest.mark.exhaustive
def test_float16_with_a_fused_optimizer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "fp16", "updates": 3, "accumulation": 2}
    expected = train("objects", tmp_path / "alone", **settings)
    run = ("objects", {"layout": {"pipeline_parallel_size": 2}, **settings})
    for (found,) in train_on_ranks(tmp_path / "stages", [run], world_size=2):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-3)


def train_with_a_penalty(folder: Path) -> None:
    train_by_objects(folder, Penalty, pipeline_parallel_size=2)


def test_a_loss_of_the_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ConfigError: compute_loss reads the model's parameters"):
        on_ranks(train_with_a_penalty, tmp_path)


class LogsInLoss(Trainer):
    """Logs the mean token of each micro-batch: in its loss, which the last stage computes, and before that."""

    may_change = False

    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        values = {"mean_token": inputs["token_ids"].double().mean()}
        self.log(values | {"late": 1.0} if self.may_change and self.iter == 1 else values)
        return super().compute_loss(model, inputs)


class LogsLater(LogsInLoss):
    may_change = True


class LogsBegin(Callback):
    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.trainer.log({"at_begin": batch["token_ids"].double().mean()})


class LogsAndReads(LogsBegin):
    """Reads each loss, so that the stages share values after each window."""

    def on_train_batch_end(self, batch: Any, logs: Any) -> None:
        float(logs["step_loss"])


def logged_on_stages(folder: Path, kind: type[Trainer] = LogsInLoss) -> list[dict[str, Any]]:
    runs = []
    for callback in (LogsBegin(), LogsAndReads()):
        config = TrainingConfig(
            output_dir=str(folder / type(callback).__name__), num_epochs=1, batch_size=2, log_steps=2, metrics=None,
            gradient_accumulation_steps=4, save_enabled=False, eval_strategy="no", pipeline_parallel_size=2,
            dataloader_shuffle=False, dataloader_drop_last=False, progress_bar=False,
        )  # fmt: skip
        trainer = kind(build_gpt(), config, samples(21), callbacks=[callback])
        trainer.train()
        rows = trainer.history if get_rank() == 0 else []
        names = ("mean_token", "at_begin")
        values = {name: [value for value, _ in trainer.storage.history(name).values()] for name in names}
        runs.append({"written": [row["mean_token"] for row in rows if "mean_token" in row], **values})
    return runs


def test_logged_values_are_means_over_the_micro_batches_on_each_stage(tmp_path: Path) -> None:
    first, last = on_ranks(logged_on_stages, tmp_path)
    tokens = torch.stack([sample["token_ids"] for sample in samples(21)]).double()
    # The last update has micro-batches of 2, 2 and 1 samples, which count alike.
    means = [float(part.mean()) for part in tokens.split(8)]
    for run in (*first, *last):
        assert run["mean_token"] == pytest.approx(means)
        assert run["at_begin"] == pytest.approx(means)
    assert all(run["written"] for run in first)


class LogsBeginAgain(LogsInLoss):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.log({"at_begin": 0.0})
        return super().compute_loss(model, inputs)


def test_a_name_of_the_loss_and_of_a_callback_is_refused_on_each_stage(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"'at_begin' is logged in the loss of a pipeline and in a micro-batch"):
        on_ranks(logged_on_stages, tmp_path, LogsBeginAgain)


def test_another_name_after_the_first_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"trainer\.log: late, mean_token was logged.*after mean_token in the first"
    ):
        on_ranks(logged_on_stages, tmp_path, LogsLater)

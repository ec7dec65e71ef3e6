"""A number of batches per update that follows a schedule, in both APIs, compared with a plain loop."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LinearLR

from tests.ranks import on_ranks
from tests.toys import Samples, StopHereError, assert_equal_weights, file_config, quiet, trained
from trainwright import DefaultTrainer, LazyCall, LazyConfig, Trainer
from trainwright.base.errors import ConfigError
from trainwright.config.windows import Windows
from trainwright.data import CyclicSampler
from trainwright.engine import EagerTrainer
from trainwright.hooks import Callback, CallbackHook

SIZE, SCHEDULE, UPDATES = 4, {0: 1, 3: 2, 5: 4}, 9
LENGTH = 38  # 9 batches and a half: an update of a config file has samples of two epochs
Api = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.layer(inputs), labels)}


class InOrder(CyclicSampler):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "shuffle": False})


def data() -> Samples:
    generator = torch.Generator().manual_seed(1)
    inputs_BF = torch.randn(LENGTH, 4, generator=generator)
    return Samples(inputs=inputs_BF, labels=torch.randint(0, 3, (LENGTH,), generator=generator), length=LENGTH)


def objects(folder: Path, *, resume: bool = False, accumulation: Any = SCHEDULE, **settings: Any) -> Trainer:
    config = quiet(
        folder, gradient_accumulation_steps=accumulation, dataloader_shuffle=False,
        dataloader_drop_last=False, optimizer="SGD", learning_rate=0.1, lr_scheduler_type="linear", log_steps=1,
        save_steps=1, max_grad_norm=None, metrics=[], resume_from_checkpoint=resume or None,
        **{"num_epochs": 2, "batch_size": SIZE, "model_checkpoint": None, **settings},
    )  # fmt: skip
    return Trainer(Net(), config, data(), data() if "eval_strategy" in settings else None)


def config(
    folder: Path, *, resume: bool = False, accumulation: Any = SCHEDULE, graph: Any = None, kind: Any = DefaultTrainer,
    **train: Any,
) -> DefaultTrainer:  # fmt: skip
    cfg = file_config(folder, Net, data)
    cfg.graph.update(graph or {})
    cfg.train.update({
        "train_micro_batch_size": SIZE, "num_accumulation_steps": accumulation, "resume": resume, "log_period": 1,
        "scheduler": LazyCall(LinearLR)(start_factor=1.0, end_factor=0.1, total_iters=UPDATES), "train_iter": UPDATES,
        "input_placement_device": "cpu", "checkpointer": {"period": 1}, **train,
    })  # fmt: skip
    cfg.dataloader.train.sampler = InOrder
    cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
    trainer: DefaultTrainer = kind(cfg)
    return trainer


APIS = pytest.mark.parametrize("api", [objects, config])


def batches(api: Api) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The batches in their order, and whether an epoch ends: in the Python API with a shorter one."""
    inputs, labels = (torch.stack([torch.as_tensor(one[name]) for one in data()]) for name in ("inputs", "labels"))
    if api is objects:
        while True:
            for start in range(0, LENGTH, SIZE):
                yield inputs[start : start + SIZE], labels[start : start + SIZE], start + SIZE >= LENGTH
    start = 0
    while True:
        at = torch.arange(start, start + SIZE) % LENGTH
        yield inputs[at], labels[at], False
        start += SIZE


def reference(api: Api, updates: int) -> tuple[Net, list[float], list[float], list[int]]:
    """A plain loop: the model, and of each update the loss, the rate and the samples so far."""
    model, read = Net(), batches(api)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, rates, samples = [], [], [0]
    for update in range(updates):
        window: list[tuple[Tensor, Tensor]] = []
        is_end = False
        while len(window) < max(pair for pair in SCHEDULE.items() if pair[0] <= update)[1] and not is_end:
            inputs, labels, is_end = next(read)
            window.append((inputs, labels))
        size = sum(len(labels) for _, labels in window)
        rate = 0.1 * (1 - update / updates) if api is objects else 0.1 + (0.01 - 0.1) * update / UPDATES
        optimizer.param_groups[0]["lr"] = rate
        loss = sum(F.cross_entropy(model.layer(inputs), labels, reduction="sum") for inputs, labels in window) / size
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(rate)
        samples.append(samples[-1] + size)
    return model, losses, rates, samples[1:]


def values(trainer: Any, name: str) -> list[float]:
    return [value for value, _ in trainer.storage.history(name).values()]


@APIS
def test_the_run_is_that_of_a_plain_loop(api: Api, tmp_path: Path) -> None:
    samples: list[int] = []
    trainer = api(tmp_path)
    trainer.register_hooks([CallbackHook(after_step=lambda trainer: samples.append(trainer.consumed_samples))])
    trainer.train()
    model, losses, rates, expected = reference(api, UPDATES)
    assert trainer.max_iter == UPDATES
    assert samples == expected
    assert values(trainer, "total_loss") == pytest.approx(losses, abs=1e-6)
    assert values(trainer, "lr") == pytest.approx(rates)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(dict(trainer.model.named_parameters())[name], weight, atol=1e-6, rtol=0)


class Dies(Callback):
    """Ends the run within an update, before a batch of the run."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.left = batch

    def on_train_batch_begin(self, batch: Any, logs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise StopHereError


@APIS
@pytest.mark.parametrize("batch", [2, 4, 5, 8, 11, 15])
def test_killed_and_resumed_is_uninterrupted(
    api: Api, batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(api(tmp_path / "whole"))
    killed = api(tmp_path / "cut")
    killed.add_callback(Dies(batch))
    with pytest.raises(StopHereError):
        killed.train()
    again = api(tmp_path / "cut", resume=True)
    assert 0 < again.start_iter == killed.iterations_done < UPDATES
    with caplog.at_level("WARNING"):
        again = trained(again)
    assert not [one.getMessage() for one in caplog.records if "has no effect" in one.getMessage()]
    assert_equal_weights(again.model, whole.model)
    rows = [
        [{k: v for k, v in json.loads(row).items() if "time" not in k} for row in file.read_text().splitlines()]
        for file in (tmp_path / "cut/metrics.json", tmp_path / "whole/metrics.json")
    ]
    assert rows[0] == rows[1]
    assert again.consumed_samples == whole.consumed_samples


@pytest.mark.parametrize("max_steps", [4, 6, 9, 14])
def test_max_steps_ends_a_window(max_steps: int, tmp_path: Path) -> None:
    trainer = trained(objects(tmp_path, max_steps=max_steps))
    ends = [1, 2, 3, 5, 7, 10, 14, 18, 20]  # the third window of four ends with the first epoch
    assert trainer.max_iter == next(number for number, end in enumerate(ends, 1) if end >= max_steps)
    assert trainer.state.global_step == max_steps


@APIS
def test_epochs_end_where_their_samples_do(api: Api, tmp_path: Path) -> None:
    found: list[int] = []

    class Sees(Callback):
        def on_epoch_begin(self, epochs: int, logs: Any) -> None:
            found.append(trainer.iter)

    many = {"num_epochs": 4} if api is objects else {"train_epoch": 4, "train_iter": 0}
    trainer = api(tmp_path, **many)
    trainer.add_callback(Sees())
    trainer.train()
    windows = Windows.of(SCHEDULE)
    if api is config:  # an epoch begins with the update of its first sample
        firsts = [next(n for n in range(99) if windows.before(n) * SIZE >= epoch * LENGTH) for epoch in range(4)]
        assert trainer.max_iter == next(n for n in range(99) if windows.before(n) * SIZE >= 4 * LENGTH)
    else:
        firsts = [0, 6, 9, 12]
        assert trainer.max_iter == 15
    assert found == firsts


def test_periods_in_epochs_of_a_config_file(tmp_path: Path) -> None:
    trainer = trained(config(tmp_path, train_iter=14, checkpointer={"save_model_after_n_epoch": 2}))
    saved = sorted(path.name for path in tmp_path.glob("model_0*"))
    windows = Windows.of(SCHEDULE)
    periods = [windows.before(number) * SIZE // (2 * LENGTH) for number in range(15)]
    ends = [number for number in range(1, 15) if periods[number] > periods[number - 1]]
    assert len(ends) == 2
    assert saved == [f"model_{end - 1:07d}" for end in ends]
    assert trainer.consumed_samples == windows.before(14) * SIZE


@APIS
def test_sample_ids_are_those_of_each_update(api: Api, tmp_path: Path) -> None:
    trainer = trained(api(tmp_path))
    found = [[index for batch in trainer.sample_ids(update) for index in batch] for update in range(1, UPDATES + 1)]
    *_, samples = reference(api, UPDATES)
    every = [index % LENGTH for index in range(samples[-1])]
    assert found == [every[start:end] for start, end in zip([0, *samples], samples, strict=False)]


@APIS
def test_graph_mode_has_the_numbers_of_eager_steps(api: Api, tmp_path: Path) -> None:
    eager = trained(api(tmp_path / "eager"))
    if api is objects:
        compiled: Any = objects(tmp_path / "graph", graph=True, graph_backend="aot_eager")
    else:
        compiled = config(tmp_path / "graph", graph={"enabled": True, "backend": "aot_eager"})
    trained(compiled)
    assert values(compiled, "total_loss") == pytest.approx(values(eager, "total_loss"), abs=1e-6)


def of_rank(api: Api, folder: Path, zero: int) -> tuple[list[float], int, dict[str, Tensor]]:
    if api is objects:
        trainer = objects(folder, batch_size=SIZE // 2, zero_stage=zero)
    else:
        stage = {"enabled": zero > 0, "stage": zero or 1}
        trainer = config(folder, train_micro_batch_size=SIZE // 2, zero_optimization=stage)
    trained(trainer)
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    weights = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in weights.items()}
    return values(trainer, "total_loss"), trainer.consumed_samples, weights


@APIS
@pytest.mark.parametrize("zero", [0, 2])
def test_two_ranks_have_the_numbers_of_one(api: Api, zero: int, tmp_path: Path) -> None:
    alone = trained(api(tmp_path / "alone"))
    for losses, samples, weights in on_ranks(of_rank, api, tmp_path / "ranks", zero):
        assert losses == pytest.approx(values(alone, "total_loss"), abs=1e-6)
        assert samples == alone.consumed_samples
        for name, weight in alone.model.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach(), atol=1e-6, rtol=0)


def test_own_steps_read_the_batches_of_the_current_iteration(tmp_path: Path) -> None:
    read: list[int] = []

    class Own(EagerTrainer):
        def run_step(self, get_batch: Any = None, input_placement_device: Any = None) -> None:
            read.append(self.grad_acc_steps)
            super().run_step(get_batch, input_placement_device)

    class OwnTrainer(DefaultTrainer):
        def __init__(self, cfg: Any) -> None:
            super().__init__(cfg)
            self._trainer = Own(self.model, self.train_loader, self.optimizer, SCHEDULE)

    trained(config(tmp_path, kind=OwnTrainer))
    assert read == [Windows.of(SCHEDULE).at(update) for update in range(UPDATES)]


def test_what_has_one_number_refuses_a_schedule(tmp_path: Path) -> None:
    for settings, name in (({"elastic": True}, "elastic"), ({"pipeline_parallel_size": 2}, "pipeline_parallel_size")):
        with pytest.raises(ConfigError, match=rf"gradient_accumulation_steps: got .* with {name}=.*Give one number"):
            objects(tmp_path, **settings)
        with pytest.raises(ConfigError, match=rf"num_accumulation_steps.*: got .* with train\.dist\.{name}="):
            config(tmp_path, dist=settings)
    with pytest.raises(ConfigError, match=r"train\.num_accumulation_steps: a schedule .* without global_batch_size"):
        config(tmp_path, global_batch_size=32)
    with pytest.raises(ConfigError, match=r"got \{3: 2\} .* a dict of these by the first update"):
        objects(tmp_path, accumulation={3: 2})
    with pytest.raises(
        ConfigError, match=r"train\.num_accumulation_steps.*: got .*a dict of these by the first update"
    ):
        config(tmp_path, accumulation={3: 2})


def test_another_schedule_is_no_resume_of_the_python_api(tmp_path: Path) -> None:
    trained(objects(tmp_path), stop=4)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps was \{'0': 1, '3': 2, '5': 4\} and is 2 now"):
        trained(objects(tmp_path, resume=True, accumulation=2))


def test_the_saved_configuration_is_that_of_the_run(tmp_path: Path) -> None:
    trained(config(tmp_path), stop=2)
    saved = LazyConfig.load(str(tmp_path / "config.yaml")).train.num_accumulation_steps
    assert Windows.of(saved) == Windows.of(SCHEDULE)


def test_the_change_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = objects(tmp_path)
    with caplog.at_level("INFO", logger="trainwright.hooks"):
        trainer.train()
    found = [one.getMessage() for one in caplog.records if "an update has" in one.getMessage()]
    assert found == [
        "From iteration 4 on an update has 2 batches (before: 1).",
        "From iteration 6 on an update has 4 batches (before: 2).",
    ]


def test_windows_are_those_of_a_walk() -> None:
    for schedule in (SCHEDULE, {0: 3}, {0: 2, 1: 2, 4: 1}):
        windows = Windows.of(schedule)
        lengths = [max(pair for pair in schedule.items() if pair[0] <= update)[1] for update in range(12)]
        assert [windows.at(update) for update in range(12)] == lengths
        assert [windows.before(update) for update in range(12)] == [sum(lengths[:update]) for update in range(12)]
        for num in range(20):
            assert windows.updates(num) == next(u for u in range(30) if windows.before(u) >= num)

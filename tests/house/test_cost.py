"""The cost of a step, counted: Python calls, reads of tensors, compilations. ``benchmarks/`` measures time."""

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Samples
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.data import ColumnDataset, build_image_train_loader, order
from trainwright.hooks import Callback, CallbackHook, HookBase
from trainwright.models import targets

BATCH, FEATURES, CLASSES = 32, 32, 10
LOG_EVERY = 20
STEPS = 3 * LOG_EVERY
TORCH = str(Path(torch.__file__).parent)
ON_THE_HOST = {order.__file__, targets.__file__}  # read indices and labels, where those are on the host
# What torch puts around the step of each optimizer: hooks and a label for the profiler.
STEP_OF_OPTIMIZERS = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
WARM = 10  # first steps, which do some work only once


class MLP(nn.Module):
    """Returns scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class WithLoss(MLP):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.second(F.relu(self.first(x))), labels)}


def tensors(length: int = STEPS * BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (length,), generator=generator)


def columns(length: int = STEPS * BATCH) -> ColumnDataset:
    x, labels = tensors(length)
    return ColumnDataset(x=x, labels=labels)


def python_api(folder: Path, model: nn.Module, dataset: Any, **settings: Any) -> Trainer:
    """A trainer of the Python API with its defaults, without a training metric."""
    settings = {"num_epochs": 1, "batch_size": BATCH, "log_steps": LOG_EVERY, "metrics": [], **settings}
    return Trainer(model, TrainingConfig(output_dir=str(folder), **settings), train_dataset=dataset)


def config_files(folder: Path, model: nn.Module, dataset: Any, **train: Any) -> DefaultTrainer:
    """A trainer of config files with its defaults, and with the optimizer of the Python API."""
    return config_files_with_clipping(folder, model, dataset, optim=LazyCall(torch.optim.Adam)(lr=1e-3), **train)


def config_files_with_clipping(
    folder: Path,
    model: nn.Module,
    dataset: Any,
    optim: Any = None,
    kind: type[DefaultTrainer] = DefaultTrainer,
    **train: Any,
) -> DefaultTrainer:
    """A trainer of config files with all of its defaults: AdamW in groups, whose gradients are clipped."""
    cfg = get_config("common/defaults.py")
    cfg._set_flag("allow_objects", True)
    cfg.optim = optim or cfg.optim
    cfg.model = model
    loader, _, _ = build_image_train_loader(dataset, BATCH, num_workers=0)
    cfg.dataloader = LazyCall(dict)(train=loader)
    cfg.train.update({"output_dir": str(folder), "train_iter": STEPS, "log_period": LOG_EVERY, **train})
    return kind(cfg)


class TestCalls:
    """Python calls from one forward pass to the next: ours, torch's and the data set's."""

    FAST = 129  # where batches are picked out of tensors; 35 of them are torch's own schedule and backward pass
    CLIPPED = 193  # the same with the gradients clipped, and weight decay for some of the parameters
    # Where batches are made of samples: more than the plain loop makes on the same data.
    MORE = 30

    def test_a_tensor_dataset_through_the_python_api(self, tmp_path: Path) -> None:
        trainer = python_api(tmp_path, MLP(), TensorDataset(*tensors()))
        assert calls_of_a_step(trainer.train, MLP) <= self.FAST

    @pytest.mark.parametrize(("api", "most"), [(python_api, FAST), (config_files, 106)])
    def test_tensors_by_name(self, api: Callable[..., Any], most: int, tmp_path: Path) -> None:
        trainer = api(tmp_path, WithLoss(), columns())
        assert calls_of_a_step(trainer.train, WithLoss) <= most

    def test_a_callback_and_a_run_step_of_the_users_own(self, tmp_path: Path) -> None:
        class Own(DefaultTrainer):
            def run_step(self) -> None:
                super().run_step()

        trainer = config_files(tmp_path / "callback", WithLoss(), columns())
        trainer.add_callback(Callback())
        assert calls_of_a_step(trainer.train, WithLoss) <= 128
        trainer = config_files(tmp_path / "step", WithLoss(), columns(), kind=Own)
        assert calls_of_a_step(trainer.train, WithLoss) <= 108

    def test_clipping(self, tmp_path: Path) -> None:
        trainer = config_files_with_clipping(tmp_path, WithLoss(), columns())
        assert calls_of_a_step(trainer.train, WithLoss) <= self.CLIPPED

    @pytest.mark.exhaustive(every=2)
    @pytest.mark.parametrize(("api", "more"), [(python_api, MORE), (config_files, 6)])
    def test_any_data_set(self, api: Callable[..., Any], more: int, tmp_path: Path) -> None:
        dataset = Samples(**columns().columns)
        trainer = api(tmp_path, WithLoss(), dataset)
        plain = calls_of_a_step(lambda: plain_loop(WithLoss(), dataset), WithLoss)
        assert calls_of_a_step(trainer.train, WithLoss) <= plain + more


def plain_loop(model: nn.Module, dataset: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in DataLoader(dataset, BATCH, shuffle=True):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()


def calls_of_a_step(train: Callable[[], object], model: type[nn.Module]) -> float:
    """The median over the steps, without the calls within the optimizer's step, which are torch's own."""
    code, num_calls, at_forward = model.forward.__code__, 0, list[int]()
    optimizer_step: FrameType | None = None

    def record(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls, optimizer_step
        if optimizer_step is not None:
            if event == "return" and frame is optimizer_step:
                optimizer_step = None
        elif event == "call":
            if frame.f_code is STEP_OF_OPTIMIZERS:
                optimizer_step = frame
            num_calls += 1
            if frame.f_code is code:
                at_forward.append(num_calls)

    sys.setprofile(record)
    try:
        train()
    finally:
        sys.setprofile(None)
    assert len(at_forward) >= STEPS
    warm = at_forward[WARM:STEPS]
    return statistics.median(after - before for before, after in itertools.pairwise(warm))


class TestReads:
    """No step reads the value of a tensor, which would synchronize with an accelerator; log lines do."""

    @pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}], ids=str)
    def test_a_step_of_the_python_api_reads_no_tensor(self, settings: dict[str, Any], tmp_path: Path) -> None:
        trainer = python_api(tmp_path, WithLoss(), columns(), **settings)
        assert reads_between_lines(trainer) == []

    @pytest.mark.parametrize("train", [{}, {"num_accumulation_steps": 2}], ids=str)
    def test_a_step_of_config_files_reads_no_tensor(self, train: dict[str, Any], tmp_path: Path) -> None:
        trainer = config_files_with_clipping(tmp_path, WithLoss(), columns(), **train)
        assert reads_between_lines(trainer) == []

    def test_training_metrics_read_no_tensor_in_a_step(self, tmp_path: Path) -> None:
        trainer = python_api(tmp_path, MLP(), TensorDataset(*tensors()), metrics=["Accuracy"])
        assert reads_between_lines(trainer) == []

    def test_counting_labels_of_a_device_reads_none(self) -> None:
        assert targets.Targets().count(torch.zeros(3, dtype=torch.int64, device="meta")).device.type == "meta"  # type: ignore[union-attr]

    def test_a_read_is_seen(self, tmp_path: Path) -> None:
        class Reads(HookBase):
            def after_step(self) -> None:
                if self.trainer.iter == WARM + 1:
                    float(self.trainer.model.second.bias.detach().sum())

        trainer = python_api(tmp_path, WithLoss(), columns())
        trainer.register_hooks([Reads()])
        assert {read.partition(":")[0] for read in reads_between_lines(trainer)} == {f"iteration {WARM + 1}"}


class PutsMetrics(HookBase):
    slot = "evaluate"  # before the lines

    def __init__(self) -> None:
        self.lines: set[int] = set()  # the iterations that end an epoch with a line

    def after_step(self) -> None:
        if any(hook.shows_results for hook in self.trainer.hooks):
            self.lines.add(self.trainer.iter)
        self.trainer.storage.put_scalar("norm_of_bias", self.trainer.model.second.bias.detach().norm())


class Reads(TorchFunctionMode):
    """Records calls of torch that return the value of a tensor to Python, with the iteration and the line of code."""

    NAMES = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "nonzero")

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer, self.found = trainer, list[tuple[int, str]]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.NAMES:
            self.record(name)
        return function(*args, **(kwargs or {}))

    def record(self, name: str) -> None:
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith((TORCH, __file__)) and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_code.co_filename in ON_THE_HOST:
            return
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.found.append((self.trainer.iter, f"iteration {self.trainer.iter}: {name} in {place}"))


class ReadsBelow(TorchDispatchMode):
    """As above, for calls that torch itself makes below Python."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self._reads.record("_local_scalar_dense")
        return function(*args, **(kwargs or {}))


def reads_between_lines(trainer: Any) -> list[str]:
    """The reads of a training in which the user records a metric in each step, without those of log lines.

    Lines of epochs read, too: there is at most one for each ``LOG_EVERY`` iterations.
    """
    puts = PutsMetrics()
    trainer.register_hooks([puts])
    reads = Reads(trainer)
    with reads, ReadsBelow(reads):
        trainer.train()
    assert reads.found, "log lines read tensors: nothing has been recorded"
    last = trainer.max_iter - 1
    assert len(puts.lines) <= trainer.max_iter / LOG_EVERY

    def is_between(iteration: int) -> bool:
        return WARM < iteration < last and (iteration + 1) % LOG_EVERY != 0 and iteration not in puts.lines

    return list(dict.fromkeys(read for iteration, read in reads.found if is_between(iteration)))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_in_graph_mode_nothing_is_compiled_after_the_first_steps(tmp_path: Path) -> None:
    """Whatever the schedule and an epoch's last batch do."""
    from torch._dynamo.utils import counters

    settings = {"num_epochs": 3, "lr_scheduler_type": "cosine", "warmup_steps": 4, "max_grad_norm": 1.0, "log_steps": 4}
    data = columns(length=5 * BATCH + 7)
    trainer = python_api(tmp_path, WithLoss(), data, graph=True, dataloader_drop_last=False, **settings)
    before, compiled = counts(counters), list[int]()
    trainer.register_hooks([CallbackHook(after_step=lambda _: compiled.append(counts(counters) - before))])
    trainer.train()
    assert len(compiled) == 18
    assert compiled[3] > 0
    assert set(compiled[3:]) == {compiled[3]}


def counts(counters: Any) -> int:
    return sum(sum(section.values()) for section in counters.values())

"""Gradual unfreezing in both APIs, compared with a plain loop, bit for bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.toys import Samples, WithNorm, assert_equal_weights
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainingConfig, get_config
from trainwright.base.errors import ConfigError, ConfigKeyError
from trainwright.data import CyclicSampler, build_image_train_loader
from trainwright.hooks import CallbackHook
from trainwright.optim import LayerFreezer

BATCH, STEPS = 4, 6
Api = Callable[..., Any]
SCHEDULE = [{"step": 4, "layers": ["first"]}, {"step": 0.25, "layers": ["norm", "last.bias"]}]


def data() -> Samples:
    return Samples(inputs=torch.randn(BATCH * 3, 3, generator=torch.Generator().manual_seed(1)), labels=lambda i: i % 2)


def objects(folder: Path, unfreeze: Any, *, resume: bool = False) -> Trainer:
    settings = TrainingConfig(
        output_dir=str(folder), unfreeze=unfreeze, batch_size=BATCH, num_epochs=2, metrics=[], lr=0.1, save_steps=1,
        dataloader_shuffle=False, lr_scheduler_type=None, weight_decay=0.1, device="cpu", progress_bar=False,
        resume_from_checkpoint=resume or None,
    )  # fmt: skip
    return Trainer(WithNorm(), settings, data())


def config(folder: Path, unfreeze: Any, *, resume: bool = False, graph: bool = False) -> DefaultTrainer:
    cfg = get_config("common/defaults.py")
    cfg._set_flag("allow_objects", True)
    cfg.model = LazyCall(WithNorm)()
    loader = LazyCall(build_image_train_loader)(
        dataset=LazyCall(data)(), num_workers=0, sampler=partial(CyclicSampler, shuffle=False)
    )
    cfg.dataloader = {"train": loader}
    cfg.optim = LazyCall(torch.optim.Adam)(lr=0.1, weight_decay=0.1)
    cfg.graph.update({"enabled": graph, "backend": "aot_eager"})
    cfg.train.update(
        {
            "output_dir": str(folder), "unfreeze": unfreeze, "train_micro_batch_size": BATCH, "train_iter": STEPS,
            "scheduler": LazyCall(torch.optim.lr_scheduler.ConstantLR)(factor=1.0), "resume": resume,
            "checkpointer": {"period": 1}, "input_placement_device": "cpu",
        }
    )  # fmt: skip
    return DefaultTrainer(cfg)


APIS = pytest.mark.parametrize("api", [objects, config])


def reference(stages: dict[int, list[str]]) -> WithNorm:
    """A plain loop that freezes by hand, with the optimizer over all parameters."""
    model = WithNorm()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    freezer = LayerFreezer(model)
    for names in stages.values():
        freezer.by_names(names)
    batches = [*DataLoader(data(), BATCH)] * 2
    for step, batch in enumerate(batches):
        if step in stages:
            freezer.by_names(stages[step], freeze=False)
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.exhaustive(every=2)
@APIS
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        (SCHEDULE, {2: ["norm", "last.bias"], 4: ["first"]}),
        ([{"epoch": 1, "layers": ["first", "norm"]}], {3: ["first", "norm"]}),
    ],
    ids=["steps", "epochs"],
)
@pytest.mark.slow
def test_layers_are_trained_from_their_step_on(api: Api, schedule: Any, stages: Any, tmp_path: Path) -> None:
    trainer = api(tmp_path, schedule)
    trainer.train()
    assert_equal_weights(trainer.model, reference(stages))


@pytest.mark.exhaustive(every=6)
@APIS
@pytest.mark.parametrize("stop", [2, 3])
@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted(api: Api, stop: int, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def leave(trainer: Any) -> None:
        if trainer.iter == stop:
            raise StopError

    cut = api(tmp_path, SCHEDULE)
    cut.register_hooks([CallbackHook(before_step=leave)])
    with pytest.raises(StopError):
        cut.train()
    resumed = api(tmp_path, SCHEDULE, resume=True)
    resumed.train()
    assert_equal_weights(resumed.model, reference({2: ["norm", "last.bias"], 4: ["first"]}))


@pytest.mark.exhaustive
def test_graph_mode_trains_the_same_layers(tmp_path: Path) -> None:
    trainer = config(tmp_path, SCHEDULE, graph=True)
    trainer.train()
    expected = reference({2: ["norm", "last.bias"], 4: ["first"]}).state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-5), name


@APIS
@pytest.mark.parametrize(
    ("unfreeze", "message"),
    [
        ([{"epoch": 1, "step": 2, "layers": ["first"]}], r"unfreeze.*either a step or an epoch"),
        ([{"layers": ["first"]}], r"unfreeze.*either a step or an epoch"),
        ([{"epoch": 1, "layers": ["frist"]}], r"^unfreeze: \w+ has no layer 'frist'. Did you mean 'first'"),
        (
            [{"epoch": 1, "layers": ["first", "norm", "last"]}],
            r"every parameter of WithNorm would be frozen until step 3",
        ),
        ({"epoch": 1}, r"unfreeze.*it must be a list such as.*Item 0 lacks the key 'layers'"),
        (
            {"epoch": 1, "layers": ["first"]},
            r"Write (unfreeze=\[{'epoch': 1, 'layers': \['first'\]}\]"
            r"|'train.unfreeze=\[{epoch: 1, layers: \[first\]}\]'), with brackets",
        ),
        ([{"epoch": 1, "layers": [0]}], r"Item 0 has layers=\[0\]; it must be a list of names of layers, \['0'\]"),
        ([{"epoch": 1, "layers": "first"}], r"Item 0 has layers='first'; it must be a list.*, \['first'\]"),
        (
            [{"epoch": 1, "layers": ["first"]}, {"epoch": 0, "layers": ["last"]}],
            r"Item 1 has epoch=0; it must be a",
        ),
        ([{"epochs": 1, "layers": ["first"]}], r"Item 0 has no key 'epochs'. Did you mean 'epoch'"),
        ([{"step": 1, "layers": ["first"]}, "last"], r"Item 1 is 'last'; it must be a dict"),
    ],
)
def test_a_wrong_setting_is_refused(api: Api, unfreeze: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ConfigKeyError), match=message):
        api(tmp_path, unfreeze)


@APIS
def test_a_step_after_the_end_is_a_warning(api: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api(tmp_path, [{"step": 100, "layers": ["first"]}])
    assert "unfreeze: 'first' is never trained, step 100 is after the end" in caplog.text


@APIS
def test_the_log_names_what_is_frozen_and_what_is_trained_from_a_step_on(
    api: Api, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainwright")
    api(tmp_path, SCHEDULE).train()
    assert "Frozen      'norm', 'last.bias' until step 2, 'first' until step 4" in caplog.text
    assert "Step 2: trained from now on: 'norm', 'last.bias'." in caplog.text
    assert "Step 4: trained from now on: 'first'." in caplog.text

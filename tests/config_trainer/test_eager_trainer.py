"""The steps of config files: what makes them, and what is reported about one of the user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.config_trainer.test_default_trainer import config
from tests.engine.conftest import Classifier, batches, classifier
from tests.toys import assert_equal_weights
from trainwright import DefaultTrainer
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.engine import EagerTrainer


def test_a_loader_that_gives_nothing_is_an_error() -> None:
    model = classifier()
    with pytest.raises(ConfigError, match="gave no batch"):
        EagerTrainer(model, [], torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_tuples_and_wrong_names_are_explained() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = [{"input": torch.randn(2, 6), "labels": torch.zeros(2, dtype=torch.long)}]
    with pytest.raises(ConfigTypeError, match=r"Classifier\.forward.*'input'.*Did you mean 'inputs'"):
        EagerTrainer(model, wrong, optimizer).train(0, 1)
    pairs = DataLoader([(torch.randn(6), 1), (torch.randn(6), 2)], batch_size=2)
    with pytest.raises(ConfigTypeError, match="named fields"):
        EagerTrainer(model, pairs, optimizer).train(0, 1)


def test_a_forward_without_the_labels_is_answered_with_the_one_to_write() -> None:
    class Scores(Classifier):
        def forward(self, inputs: Tensor) -> Any:
            return self.body(inputs)

    model, optimizer = Scores(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    text = r'Write def forward\(self, inputs, labels\), which returns \{"loss": loss, "prediction_scores": scores\}\.'
    with pytest.raises(ConfigTypeError, match=text):
        EagerTrainer(model, batches(1), optimizer).train(0, 1)
    pairs = [(torch.zeros(2, 4), torch.zeros(2))]
    with pytest.raises(ConfigTypeError, match=r"Return \{'inputs': \.\.\.\} from its __getitem__"):
        EagerTrainer(model, pairs, optimizer).train(0, 1)


def test_a_type_error_of_the_models_own_is_not_dressed_up() -> None:
    class Broken(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": inputs + "text"}  # type: ignore[operator]

    model = Broken()
    with pytest.raises(TypeError) as caught:
        EagerTrainer(model, batches(1), torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)
    assert not isinstance(caught.value, ConfigTypeError)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x, r"returned Tensor.*must return a dict"),
        (
            lambda x: {"logits": x},
            r"returned 'logits'.*must contain 'loss', such as \{\"loss\": torch\.nn\.functional\.cross_en",
        ),
        (lambda x: {}, "an empty dict"),
        (lambda x: {"loss": x}, r"'loss' has shape \(8, 3\).*mean"),
        (lambda x: {"loss": x.mean().item()}, "'loss' is float.*must be a tensor"),
        (lambda x: {"loss": x.mean().detach()}, "cannot be differentiated"),
    ],
)
def test_a_model_that_gives_no_loss_is_explained(returned: Any, message: str) -> None:
    class Odd(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> Any:
            return returned(self.body(inputs))

    model = Odd()
    with pytest.raises((ConfigError, ConfigTypeError), match=message):
        EagerTrainer(model, batches(1), torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_a_causal_language_model_without_labels_names_them() -> None:
    class CausalLMOutput(dict[str, Tensor]):
        pass

    class Net(nn.Embedding):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
            return CausalLMOutput(logits=super().forward(input_ids))

    model = Net(16, 16)
    batch = {"input_ids": torch.arange(16).reshape(4, 4)}
    with pytest.raises(ConfigError, match=r"returned 'logits'.*: add labels=input_ids to each sample") as caught:
        EagerTrainer(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)
    assert "The batch has no field 'labels', which Net.forward takes." in caught.value.__notes__


def test_an_own_step_has_all_it_needs() -> None:
    class MyEagerTrainer(EagerTrainer):
        def __init__(self, model: nn.Module, data_loader: Any, optimizer: Any, grad_acc_steps: int = 1) -> None:
            super().__init__(model, data_loader, optimizer, grad_acc_steps)
            self.previous_output: Any = None

        def run_step(self, get_batch: Any = None, input_placement_device: Any = None) -> None:
            data = next(self._data_loader_iter)
            loss_dict = self.model(**data)
            self.previous_output = loss_dict
            (sum(loss_dict.values()) / self.grad_acc_steps).backward()
            self.write_metrics(loss_dict, 0.0)
            self.update()

    ours, theirs = classifier(), classifier()
    data = batches(3)
    torch.manual_seed(1)
    mine = MyEagerTrainer(ours, data, torch.optim.SGD(ours.parameters(), lr=0.1))
    mine.train(0, 3)
    torch.manual_seed(1)
    EagerTrainer(theirs, data, torch.optim.SGD(theirs.parameters(), lr=0.1)).train(0, 3)
    assert_equal_weights(ours, theirs)
    assert mine.previous_output["losses"].item() == mine.storage.history("total_loss").latest()


def test_a_stepper_that_replaces_the_built_one_has_its_own_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DefaultTrainer(config(tmp_path, num_accumulation_steps=2, global_batch_size=16, train_iter=2))
    trainer._trainer = EagerTrainer(trainer.model, trainer.train_loader, trainer.optimizer)
    trainer.train()
    assert "train.num_accumulation_steps=2 has no effect" in caplog.text


def test_a_step_that_the_stepper_does_not_call_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OwnLoop(EagerTrainer):
        def run_step(self, get_batch: Callable[..., Any] | None = None, input_placement_device: Any = None) -> None:
            super().run_step(get_batch, input_placement_device)

    class OwnStep(DefaultTrainer):
        def train_step(self, model: Any, inputs: Any) -> Any:
            return super().train_step(model, inputs)

    trainer = OwnStep(config(tmp_path, train_iter=2))
    trainer._trainer = OwnLoop(trainer.model, trainer.train_loader, trainer.optimizer)
    trainer.train()
    assert "OwnStep.train_step has no effect: trainer._trainer, a OwnLoop, has its own run_step." in caplog.text


def test_a_step_cannot_be_assigned_after_the_stepper_is_built(tmp_path: Path) -> None:
    trainer: Any = DefaultTrainer(config(tmp_path))
    trainer.train_step = lambda model, inputs: {}
    with pytest.raises(ConfigError, match="was assigned after __init__"):
        trainer.train()


@pytest.mark.parametrize("place", ["trainer", "stepper"])
def test_a_run_step_that_calls_that_of_the_base_builds_one_step_a_training(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    new_step = EagerTrainer.new_step
    monkeypatch.setattr(EagerTrainer, "new_step", lambda *given, **named: built.append(1) or new_step(*given, **named))

    class OwnTrainer(DefaultTrainer):
        def run_step(self) -> None:
            super().run_step()

    class OwnStepper(EagerTrainer):
        def run_step(self, get_batch: Any = None, input_placement_device: Any = None) -> None:
            super().run_step(get_batch, input_placement_device)

    trainer = (OwnTrainer if place == "trainer" else DefaultTrainer)(config(tmp_path))
    if place == "stepper":
        trainer._trainer = OwnStepper(trainer.model, trainer.train_loader, trainer.optimizer)
    trainer.train()
    assert len(built) == 1
    first = trainer.storage
    trainer.train(max_iter=9)
    assert len(built) == 2
    assert (len(first.history("total_loss").values()), len(trainer.storage.history("total_loss").values())) == (6, 9)

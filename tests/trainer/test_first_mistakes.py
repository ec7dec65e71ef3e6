"""Mistakes of a first program: the message says what to write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.toys import Classifier, Samples, file_config, points
from trainwright import DefaultTrainer, LazyCall, Trainer, TrainerConfig, TrainingConfig
from trainwright.cli.main import main

INPUTS, LABELS = torch.randn(16, 4), torch.randint(3, (16,))
DATA = TensorDataset(INPUTS, LABELS)


class NoReturn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Any) -> None:
        self.layer(x)


class InList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]

    def forward(self, x: Any) -> Any:
        return self.layers[0](x)


class LossAsNumber(NoReturn):
    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels).item()}


class LossOfItsOwn(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        return nn.functional.cross_entropy(model(inputs[0]), inputs[1]).detach().numpy()


def hits(predictions: Any, labels: Any) -> Any:
    return (predictions.argmax(1) == labels).float().mean()


def wider(folder: Path) -> Any:
    trained = settings(output_dir=folder)
    Trainer(nn.Linear(4, 3), trained, DATA).train()
    return Trainer(nn.Linear(4, 5), settings(output_dir=folder, resume_from_checkpoint=True), DATA)


class TooLong(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], LABELS[index]


def settings(**more: Any) -> TrainingConfig:
    return TrainingConfig(**{"num_epochs": 1, "tensorboard": None, **more})


def of_files(folder: Path, **train: Any) -> Any:
    return DefaultTrainer(file_config(folder, Classifier, points, train_iter=1, **train))


class OwnBackward(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = nn.functional.cross_entropy(model(inputs[0]), inputs[1])
        loss.backward()
        return loss


def trained(folder: Path, model: Any = None, data: Any = DATA, **more: Any) -> Trainer:
    config = settings(output_dir=folder, batch_size=4, **more)
    trainer = Trainer(nn.Linear(4, 3) if model is None else model, config, data, data)
    trainer.train()
    return trainer


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a dict of settings": (
        lambda folder: Trainer(nn.Linear(4, 3), {"num_epochs": 1}, DATA),  # type: ignore[arg-type]
        "Write TrainingConfig(**config).",
    ),
    "a name as a model": (
        lambda folder: Trainer("bert", settings(), DATA),  # type: ignore[arg-type]
        "AutoModel.from_pretrained('bert')",
    ),
    "a part of an epoch": (lambda folder: TrainingConfig(num_epochs=2.5), "set max_steps"),
    "a number as text": (lambda folder: settings(learning_rate="1e-3"), "Write 1e-3, without quotes."),
    "a whole number as text": (lambda folder: settings(batch_size="32"), "Write 32, without quotes."),
    "a switch for a dict": (lambda folder: settings(early_stopping=True), "Write early_stopping={'patience': 3}."),
    "a function as a callback": (
        lambda folder: Trainer(nn.Linear(4, 3), settings(), DATA, callbacks=[print]),  # type: ignore[list-item]
        "def on_epoch_end(self, epochs, logs)",
    ),
    "a function as a metric": (
        lambda folder: settings(metrics=[len]),
        "go to the Trainer: metrics_handler=[...]",
    ),
    "no return": (
        lambda folder: Trainer(NoReturn(), settings(output_dir=folder), DATA).train(),
        "Is a return missing in it?",
    ),
    "a loss as a number": (
        lambda folder: Trainer(LossAsNumber(), settings(output_dir=folder), Samples(x=INPUTS, labels=LABELS)).train(),
        "without .item()",
    ),
    "a loss of a method as a number": (
        lambda folder: LossOfItsOwn(nn.Linear(4, 3), settings(output_dir=folder), DATA).train(),
        "without .item()",
    ),
    "a metric as a number": (
        lambda folder: Trainer(nn.Linear(4, 3), settings(output_dir=folder), DATA, DATA, metrics_handler=hits).train(),
        "for example {'hits': value}.",
    ),
    "a schedule without its arguments": (
        lambda folder: settings(lr_scheduler={"name_": "StepLR", "gamma": 0.5}),
        "Write lr_scheduler={'name_': 'StepLR', 'gamma': 0.5, 'step_size': ...}.",
    ),
    "a task that needs none": (
        lambda folder: TrainerConfig(output_dir=str(folder), task="image_classification"),
        "Leave out task= (a TrainerConfig needs one: use a TrainingConfig)",
    ),
    "a task of another library": (
        lambda folder: TrainerConfig(output_dir=str(folder), task="token-classification"),
        "Write task='sequence_labeling'.",
    ),
    "a resume with another model": (wider, "init_weights_from (train.load_weight) loads the weights that fit"),
    "an evaluation of losses alone": (
        lambda folder: DefaultTrainer(
            file_config(
                folder, LazyCall(Classifier)(is_scored=False), points, points, train_iter=1, train_micro_batch_size=4
            )
        ).train(),
        "LazyCall(PPLEvaluator)() reads the losses alone",
    ),
    "classes for a loss of numbers": (
        lambda folder: Trainer(nn.Linear(4, 3), settings(output_dir=folder, loss="MSELoss"), DATA).train(),
        "For class labels set loss='CrossEntropyLoss'",
    ),
    "a length that is too large": (
        lambda folder: Trainer(nn.Linear(4, 3), settings(output_dir=folder), TooLong()).train(),
        "TooLong.__len__ returns 40",
    ),
    "a backward of its own": (
        lambda folder: OwnBackward(nn.Linear(4, 3), settings(output_dir=folder), DATA).train(),
        "return the loss alone",
    ),
    "labels of another shape": (
        lambda folder: trained(
            folder, nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), TensorDataset(INPUTS, LABELS / 2), loss="BCELoss"
        ),
        "labels.float().unsqueeze(1)",
    ),
    "a metric of numbers for classes": (
        lambda folder: trained(folder, metrics=["MeanSquaredError"]),
        "of scores of classes use Accuracy",
    ),
    "layers in a list": (lambda folder: trained(folder, InList()), "several of them as an nn.ModuleList"),
    "layers in a list, in a file": (
        lambda folder: DefaultTrainer(file_config(folder, InList, points, train_iter=1, train_micro_batch_size=4)),
        "InList has no parameters: assign its layers in __init__, several of them as an nn.ModuleList",
    ),
    "a lazy call of an object": (lambda folder: LazyCall(nn.Linear(4, 3)), "LazyCall(Linear)(...)"),
    "a path as a configuration": (lambda folder: DefaultTrainer("c.py"), "LazyConfig.load('c.py')"),  # type: ignore[arg-type]
    "a schedule by name": (lambda folder: of_files(folder, scheduler="cosine"), "Write LazyCall(WarmupCosineLR)(...)"),
    "a period by its name": (
        lambda folder: of_files(folder, evaluation={"eval_period": "epoch"}),
        "Write train.evaluation.eval_after_n_epoch=1.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_has_the_line_to_write(mistake: str, tmp_path: Path) -> None:
    call, line = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as raised:
        call(tmp_path)
    assert line in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def mse(y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred).square().mean()


class LossOfKeras(nn.Module):
    def forward(self, labels: Any, logits: Any) -> Any:
        return nn.functional.cross_entropy(labels, logits)  # as it is called


def test_a_function_that_takes_the_labels_first_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, given = TensorDataset(INPUTS, INPUTS[:, :1]), settings(output_dir=tmp_path, metrics=None)
    with caplog.at_level("INFO", "trainwright"):
        Trainer(nn.Linear(4, 1), given, data, data, loss=mse).train()
        Trainer(nn.Linear(4, 3), settings(output_dir=tmp_path), DATA, loss=LossOfKeras(), metrics_handler=mse)
    found = [(one.levelname, one.getMessage()) for one in caplog.records if "is called with" in one.getMessage()]
    assert found[0] == (
        "INFO",
        "Trainer.loss: mse(y_true, y_pred) is called with (output, target), in this order; if the order matters,"
        " exchange its parameters.",
    )
    assert [(level, text.partition(" is called")[0]) for level, text in found[1:]] == [
        ("INFO", "metrics_handler: mse(y_true, y_pred)"),
        ("WARNING", "Trainer.loss: LossOfKeras(labels, logits)"),
    ]


@pytest.mark.parametrize("is_squeezed", [False, True])
@pytest.mark.parametrize("ends", ["sigmoid", "relu"])
def test_a_sigmoid_before_a_loss_that_applies_one_is_a_warning(
    ends: str, is_squeezed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Net(nn.Linear):
        def forward(self, x: Any) -> Any:
            scores = getattr(torch, ends)(super().forward(x))
            return scores.squeeze(1) if is_squeezed else scores

    labels = (LABELS > 1).float() if is_squeezed else (LABELS > 1).float().unsqueeze(1)
    trained(tmp_path, Net(4, 1), TensorDataset(INPUTS, labels), loss="BCEWithLogitsLoss", metrics=None)
    assert caplog.text.count("or set loss='BCELoss'") == (ends == "sigmoid")


class Longer(TensorDataset):
    def set_epoch(self, epoch: int) -> None: ...


def test_an_accumulation_over_more_than_an_epoch_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path / "4", gradient_accumulation_steps=4)
    trained(tmp_path / "limited", gradient_accumulation_steps=4, limit_train_batches=1)
    assert "so none has more" not in caplog.text
    trained(tmp_path / "longer", data=Longer(INPUTS, LABELS), gradient_accumulation_steps=5)
    assert "so none has more" not in caplog.text
    trainer = trained(tmp_path / "5", num_epochs=2, gradient_accumulation_steps=5)
    assert trainer.iterations_done == 2
    trainer.config.num_epochs = 3
    trainer.inner_training_loop(3)
    assert caplog.text.count("gradient_accumulation_steps: got 5, and an epoch has 4 batches") == 1


def test_a_second_call_of_train_names_the_setting_for_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path).train()
    assert "Nothing to train: 4 of 4 iterations are done. A larger num_epochs or max_steps (" in caplog.text


def test_a_model_of_lightning_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class OfLightning(nn.Linear):
        def training_step(self, batch: Any, number: int) -> None: ...
        def configure_optimizers(self) -> None: ...

    Trainer(OfLightning(4, 3), settings(output_dir=tmp_path), DATA).train()
    assert "OfLightning.training_step and configure_optimizers are not called" in caplog.text


def test_a_misspelt_configuration_file_is_answered_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.py").touch()
    assert main(["train", str(tmp_path / "confg.py")]) == 2
    printed = capsys.readouterr().err
    assert "Did you mean 'config.py'?" in printed
    assert printed.count("Did you mean") == 1

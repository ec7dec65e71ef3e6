import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.toys import Stream
from trainwright.base.errors import ConfigError, ConfigTypeError
from trainwright.evaluation import ClsEvaluator, DatasetEvaluator, EvaluationError, PPLEvaluator, inference_on_dataset
from trainwright.evaluation.loop import evaluate_loaders
from trainwright.models.eval_mode import evaluation_mode


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, labels):
        scores = self.dropout(self.norm(self.linear(x)))
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss} if self.training else {"prediction_scores": scores, "loss": loss}


class Recorder(DatasetEvaluator):
    """Keeps all that it is given."""

    def reset(self) -> None:
        self.batches = []

    def process(self, inputs, outputs) -> None:
        self.batches.append((inputs, outputs))

    def evaluate(self) -> dict:
        return {"batches": len(self.batches)}


def data(length: int = 11) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(length, 4, generator=generator), torch.randint(3, (length,), generator=generator))


def to_batch(sample, device):
    x, labels = sample
    return {"x": x.to(device), "labels": labels.to(device)}


def run(model, evaluator=None, *, loader=None, eval_iter=1e9, get_batch=to_batch):
    loader = DataLoader(data(), batch_size=4) if loader is None else loader
    return inference_on_dataset(model, loader, 4, eval_iter, get_batch, "cpu", evaluator)


def test_the_figures_are_those_of_the_whole_data_set():
    torch.manual_seed(0)
    model = Classifier()
    results = run(model, [ClsEvaluator(topk=(1, 2)), PPLEvaluator()])
    x, labels = data().tensors
    with torch.no_grad():
        outputs = model.eval()(x, labels)
    assert results["Acc@1"] == pytest.approx(
        100 * (outputs["prediction_scores"].argmax(1) == labels).double().mean().item()
    )
    assert results["loss_PPL"] == pytest.approx(outputs["loss"].exp().item(), rel=1e-5)  # float32 losses
    assert set(results) == {"Acc@1", "Acc@2", "loss_PPL"}


def test_the_evaluator_gets_the_arguments_of_the_model_and_its_outputs_unpadded():
    recorder = Recorder()
    assert run(Classifier(), recorder) == {"batches": 3}
    assert [len(inputs["x"]) for inputs, _ in recorder.batches] == [4, 4, 3]
    assert [len(outputs["prediction_scores"]) for _, outputs in recorder.batches] == [4, 4, 3]
    assert torch.equal(torch.cat([inputs["x"] for inputs, _ in recorder.batches]), data().tensors[0])
    # Without an evaluator the model just runs.
    assert run(Classifier()) == {}


def test_eval_iter_takes_no_more_batches_than_it_says():
    class Counted(DataLoader):
        fetched = 0

        def __iter__(self):
            for batch in super().__iter__():
                Counted.fetched += 1
                yield batch

    assert run(Classifier(), Recorder(), loader=Counted(data(), batch_size=2), eval_iter=2) == {"batches": 2}
    assert Counted.fetched == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_left_as_it_was_found(fails):
    model = Classifier()
    model.norm.eval()
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def drawing(sample, device):
        random.random(), np.random.rand(), torch.rand(1)
        if fails:
            raise RuntimeError("a broken batch")
        return to_batch(sample, device)

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = draw()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    if fails:
        with pytest.raises(RuntimeError, match="a broken batch"):
            run(model, get_batch=drawing)
    else:
        run(model, ClsEvaluator(topk=1), get_batch=drawing)
    assert draw() == expected
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_outputs_may_be_a_scalar_or_anything_else():
    class Loss(nn.Module):
        def forward(self, x, labels):
            return x.square().mean()

    class Pair(nn.Module):
        def forward(self, x, labels):
            return x, labels

    assert set(run(Loss(), PPLEvaluator())) == {"loss_PPL"}
    recorder = Recorder()
    run(Pair(), recorder)
    assert isinstance(recorder.batches[0][1], tuple)
    with pytest.raises(EvaluationError, match=r"ClsEvaluator needs 'prediction_scores'.*but got"):
        run(Pair(), ClsEvaluator())


def test_a_short_evaluation_says_nothing_of_its_progress(caplog):
    with caplog.at_level(logging.INFO, "trainwright"):
        run(Classifier())
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "trainwright"):
        run(Classifier())
    assert caplog.records[-1].getMessage().startswith("Evaluation: 3/3 batches, ")


def test_progress_is_said_every_five_seconds(caplog, monkeypatch):
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 2.0
        return now

    monkeypatch.setattr("trainwright.evaluation.loop.time.perf_counter", clock)
    with caplog.at_level(logging.INFO, "trainwright"):
        run(Classifier(), loader=DataLoader(data(8), batch_size=1))
    said = [record.getMessage() for record in caplog.records]
    # A batch each 2 s: said after 6 s, 12 s and at the end. Each round has 4 samples (batch_size), so 2 a second.
    assert said[0] == "Evaluation: 3/8 batches, 2.0 samples/s, 10 s left"
    assert said[1] == "Evaluation: 6/8 batches, 2.0 samples/s, 4 s left"
    assert said[2].startswith("Evaluation: 8/8 batches")


def test_a_stream_without_a_length_is_evaluated_to_its_end_or_its_limit():
    loader = DataLoader(Stream(data), batch_size=2)
    settings = {"batch_size": 2, "eval_iter": 1e9, "get_batch": to_batch}
    assert run(Classifier(), Recorder(), loader=loader) == {"batches": 6}
    assert evaluate_loaders(Classifier(), [loader], Recorder(), limit=2, **settings)["batches"] == 2
    with pytest.raises(ConfigError, match=r"limit_eval_batches: got 0.5, but DataLoader has no length"):
        evaluate_loaders(Classifier(), [loader], Recorder(), limit=0.5, **settings)
    with pytest.raises(ConfigError, match="data loader is empty"):  # not eval_iter: another rank may have batches
        evaluate_loaders(Classifier(), [[]], Recorder(), limit=0.5, **settings)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"loader": []}, ConfigError, "data loader is empty"),
        ({"eval_iter": 0}, ConfigError, "eval_iter: got 0"),
        ({"loader": iter([])}, ConfigTypeError, "no length.*__len__ that counts batches"),
        ({"evaluator": {"_target_": "x"}}, ConfigTypeError, "evaluator: got dict.*instantiate"),
        ({"evaluator": [Recorder(), ClsEvaluator]}, ConfigTypeError, "evaluator: got "),
        ({"get_batch": lambda sample, device: sample}, EvaluationError, "get_batch gave .*Classifier.forward"),
    ],
)
def test_what_cannot_be_evaluated_is_named(change, error, said):
    with pytest.raises(error, match=said):
        run(Classifier(), **change)


def test_a_tensor_that_a_model_keeps_from_evaluation_can_be_trained_with():
    class Positions(nn.Linear):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(2.0).expand(2, 2).clone()
            return super().forward(x) * self.table

    model = Positions(2, 2)
    with evaluation_mode(model):
        model(torch.ones(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    assert model.weight.grad is not None

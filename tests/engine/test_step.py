"""A step is what a hand-written loop does: same weights, bit for bit."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from trainwright.config.errors import ConfigError, ConfigTypeError
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.optim import get_default_optimizer_params


class Classifier(nn.Module):
    """B batch, F features, C classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"losses": F.cross_entropy(self.body(inputs), labels)}


def batches(count: int, size: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "inputs": torch.randn(size, 6, generator=generator),
            "labels": torch.randint(3, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def assert_equal_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, left), right in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("grad_acc_steps", [1, 3])
def test_the_weights_are_those_of_a_hand_written_loop(grad_acc_steps: int) -> None:
    ours, theirs = classifier(), classifier()
    data = batches(12)

    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for window in range(12 // grad_acc_steps):
        for batch in data[window * grad_acc_steps : (window + 1) * grad_acc_steps]:
            (theirs(**batch)["losses"] / grad_acc_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    trainer = EagerTrainer(ours, data, torch.optim.AdamW(ours.parameters(), lr=0.01), grad_acc_steps)
    trainer.train(0, 12 // grad_acc_steps)
    assert_equal_weights(ours, theirs)


def test_micro_batches_give_the_gradient_of_one_big_batch() -> None:
    model = classifier().double().eval()
    big = {k: v.double() if v.is_floating_point() else v for k, v in batches(1, 12)[0].items()}
    micro = [{k: v[i : i + 4] for k, v in big.items()} for i in (0, 4, 8)]
    results = []
    for data, steps in (([big], 1), (micro, 3)):
        one = copy.deepcopy(model)
        trainer = EagerTrainer(one, data, torch.optim.SGD(one.parameters(), lr=0.1), steps)
        one.eval()  # no dropout: the two draw different masks
        trainer.train(0, 1)
        results.append(torch.cat([p.detach().flatten() for p in one.parameters()]))
    torch.testing.assert_close(
        results[0], results[1], rtol=1e-12, atol=1e-14
    )  # float64: only the order of sums differs


def test_gradients_are_clipped_by_their_global_norm() -> None:
    ours, theirs = classifier(), classifier()
    data = batches(4)

    torch.manual_seed(1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    for batch in data:
        theirs(**batch)["losses"].backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    groups = get_default_optimizer_params(ours, weight_decay_bias=0.0, clip_grad_max_norm=0.05, clip_grad_norm_type=2.0)
    EagerTrainer(ours, data, torch.optim.SGD(groups, lr=1.0)).train(0, 4)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)  # two groups: the norm is summed in another order


def test_a_loader_that_ends_is_begun_again() -> None:
    model = classifier()
    trainer = EagerTrainer(model, batches(2), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 5)
    assert len(trainer.storage.history("total_loss").values()) == 5


def test_a_loader_that_gives_nothing_is_an_error() -> None:
    model = classifier()
    with pytest.raises(ConfigError, match="gave no batch"):
        EagerTrainer(model, [], torch.optim.SGD(model.parameters(), lr=0.1)).train(0, 1)


def test_the_metrics_of_an_update_are_the_means_over_its_micro_batches() -> None:
    model = classifier().eval()
    data = batches(2)
    expected = torch.stack([model(**batch)["losses"] for batch in data]).mean().item()
    trainer = EagerTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    model.eval()
    trainer.train(0, 1)
    assert trainer.storage.history("total_loss").latest() == pytest.approx(expected, rel=1e-6)
    assert trainer.storage.history("data_time").latest() >= 0


def test_several_entries_are_logged_each_and_losses_summed() -> None:
    class Two(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
            loss = super().forward(inputs, labels)["losses"]
            return {"main_loss": loss, "aux_loss": 2 * loss, "accuracy": torch.tensor(0.5), "features": inputs}

    torch.manual_seed(0)
    model = Two()
    trainer = EagerTrainer(model, batches(1), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 1)
    latest = {name: value for name, (value, _) in trainer.storage.latest().items()}
    assert latest["total_loss"] == pytest.approx(3 * latest["main_loss"])
    assert latest["accuracy"] == 0.5
    assert "features" not in latest


def test_a_metric_from_inside_the_model_reaches_the_storage() -> None:
    from trainwright.events import get_event_storage

    class Talking(Classifier):
        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if self.training:
                get_event_storage().put_scalar("some_accuracy", (labels == 0).float().mean())
            return super().forward(inputs, labels)

    model = Talking()
    data = batches(3)
    trainer = EagerTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train(0, 3)
    expected = [(pytest.approx((b["labels"] == 0).float().mean().item()), i) for i, b in enumerate(data)]
    assert trainer.storage.history("some_accuracy").values() == expected


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_from_the_device() -> None:
    model = classifier()
    groups = get_default_optimizer_params(model, clip_grad_max_norm=1.0, clip_grad_norm_type=2.0)
    # foreach: torch's loop over single tensors reads its step counter, which lies on the host
    trainer = EagerTrainer(model, batches(4), torch.optim.AdamW(groups, foreach=True))
    with CountReads() as counter:
        trainer.train(0, 20)
        in_steps = counter.reads
    counted = CountReads()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with counted:
        for batch in batches(4) * 5:
            model(**batch)["losses"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert in_steps <= counted.reads  # no more than torch itself


def test_tuples_and_wrong_names_are_explained() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = [{"input": torch.randn(2, 6), "labels": torch.zeros(2, dtype=torch.long)}]
    with pytest.raises(ConfigTypeError, match=r"Classifier\.forward.*'input'.*Did you mean 'inputs'"):
        EagerTrainer(model, wrong, optimizer).train(0, 1)
    pairs = DataLoader([(torch.randn(6), 1), (torch.randn(6), 2)], batch_size=2)
    with pytest.raises(ConfigTypeError, match="named fields"):
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
        (lambda x: {"logits": x}, r"returned 'logits'.*must contain 'loss'"),
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


def graph_backends() -> list[str]:
    """Inductor where there is a C++ compiler, else the backend that traces without compiling."""
    import shutil

    return ["aot_eager", "inductor"] if shutil.which("g++") or shutil.which("clang++") else ["aot_eager"]


@pytest.mark.parametrize("backend", graph_backends())
def test_graph_mode_gives_the_losses_of_eager_mode(backend: str) -> None:
    losses = []
    for graph in (False, True):
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        if graph:
            trainer: EagerTrainer = GraphTrainer(GraphBase(model, optimizer, backend=backend), batches(5), 2)
        else:
            trainer = EagerTrainer(model, batches(5), optimizer, 2)
        trainer.train(0, 50)
        losses.append(torch.tensor([value for value, _ in trainer.storage.history("total_loss").values()]))
    # float32 sums in another order, over 50 updates
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


def test_a_graph_needs_an_optimizer_and_a_backend_that_exists() -> None:
    model = classifier()
    with pytest.raises(ConfigError, match=r"graph\.backend: got 'inducktor'.*inductor"):
        GraphBase(model, backend="inducktor")
    with pytest.raises(ConfigError, match="no optimizer"):
        GraphTrainer(GraphBase(model), batches(1))


def test_the_state_of_a_graph_is_the_models() -> None:
    model = classifier()
    graph = GraphBase(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager")
    assert graph.model is model
    assert {id(p) for p in graph.parameters()} == {id(p) for p in model.parameters()}


def test_float16_scaling_uses_the_scaler_around_the_update() -> None:
    """The scaler's own arithmetic in float32 on the CPU: scaled losses, unscaled gradients, the weights of a plain
    loop.
    """
    ours, theirs = classifier(), classifier()
    data = batches(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # a power of two: scaling and unscaling are exact
    torch.manual_seed(1)
    EagerTrainer(ours, data, torch.optim.SGD(ours.parameters(), lr=0.1), grad_scaler=scaler).train(0, 3)
    torch.manual_seed(1)
    EagerTrainer(theirs, data, torch.optim.SGD(theirs.parameters(), lr=0.1)).train(0, 3)
    assert_equal_weights(ours, theirs)

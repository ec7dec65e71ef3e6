"""A step is what a hand-written loop does: same weights, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.conftest import Classifier, assert_equal_weights, batches, classifier
from trainwright.engine import EagerTrainer, GraphBase, GraphTrainer
from trainwright.optim import get_default_optimizer_params


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


def test_the_metrics_of_an_update_are_the_means_over_its_micro_batches() -> None:
    model = classifier().eval()
    data = batches(2)
    expected = torch.stack([model(**batch)["losses"] for batch in data]).mean().item()
    trainer = EagerTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    model.eval()
    trainer.train(0, 1)
    assert trainer.storage.history("total_loss").latest() == pytest.approx(expected, rel=1e-6)
    assert trainer.storage.history("data_time").latest() >= 0


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


def test_graph_mode_gives_the_losses_of_eager_mode() -> None:
    losses = []
    for graph in (False, True):
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        if graph:
            trainer: EagerTrainer = GraphTrainer(GraphBase(model, optimizer, backend="aot_eager"), batches(5), 2)
        else:
            trainer = EagerTrainer(model, batches(5), optimizer, 2)
        trainer.train(0, 50)
        losses.append(torch.tensor([value for value, _ in trainer.storage.history("total_loss").values()]))
    # float32 sums in another order, over 50 updates
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)

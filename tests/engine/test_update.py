"""An update: gradients are clipped, scaled and applied as in a hand-written loop."""

import pytest
import torch

from tests.engine.conftest import assert_equal_weights, batches, classifier
from tests.engine.token_losses import Language, Sentences, assert_same, by_hand, model_of, sgd
from trainwright.engine import EagerTrainer
from trainwright.optim import get_default_optimizer_params


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


def test_gradients_are_clipped_after_the_tokens_have_divided_them() -> None:
    data = Sentences(8)
    ours, theirs = model_of(Language), model_of(Language)
    optimizer = sgd(theirs)
    theirs(**data.slice(range(8)))["loss"].backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    optimizer.step()

    groups = [{"params": list(ours.parameters()), "clip_grad_max_norm": 0.01, "clip_grad_norm_type": 2.0}]
    trainer = EagerTrainer(
        ours, [data.slice(range(3)), data.slice(range(3, 8))], torch.optim.SGD(groups, lr=0.3, momentum=0.9), 2
    )
    trainer.train(0, 1)
    assert_same(ours, theirs)
    assert trainer.storage.history("grad_norm").latest() == pytest.approx(norm.item())


def test_a_gradient_scaler_changes_nothing_about_it() -> None:
    data = Sentences(8)
    theirs, _ = by_hand(model_of(Language), [data.slice(range(8))])
    ours = model_of(Language)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batches = [data.slice(range(3)), data.slice(range(3, 8))]
    EagerTrainer(ours, batches, sgd(ours), 2, grad_scaler=scaler).train(0, 1)
    assert_same(ours, theirs)

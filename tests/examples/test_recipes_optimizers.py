"""Recipes with several optimizers, closures and state of their own: the numbers of plain PyTorch loops."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from tests.examples.test_recipes import recipe
from tests.toys import assert_equal_weights


def gan(recipe: Any, model: Any, batches: Iterator[Any]) -> list[float]:
    optimizer_g = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    losses = []
    for (real,) in batches:
        fake = model.generator(torch.randn(len(real), recipe.NOISE))
        optimizer_d.zero_grad()
        judged = model.discriminator(real), model.discriminator(fake.detach())
        loss_d = softplus(-judged[0]).mean() + softplus(judged[1]).mean()
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = softplus(-model.discriminator(fake)).mean()
        loss_g.backward()
        optimizer_g.step()
        losses.append(loss_g.item())
    return losses


def lbfgs(recipe: Any, model: Any, batches: Iterator[Any]) -> list[float]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
    losses = []
    for inputs, labels in batches:

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    return losses


def wgan_gp(recipe: Any, model: Any, batches: Iterator[Any]) -> list[float]:
    optimizer_g = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_c = torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    losses = []
    for step, (real,) in enumerate(batches):
        fake = model.generator(torch.randn(len(real), recipe.NOISE))
        optimizer_c.zero_grad()
        distance = model.critic(fake.detach()).mean() - model.critic(real).mean()
        loss = distance + recipe.PENALTY * recipe.gradient_penalty(model.critic, real, fake.detach())
        loss.backward()
        optimizer_c.step()
        if step % recipe.CRITIC_STEPS == 0:
            optimizer_g.zero_grad()
            (-model.critic(fake).mean()).backward()
            optimizer_g.step()
        losses.append(loss.item())
    return losses


def moco(recipe: Any, model: Any, batches: Iterator[Any], keys: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for (images,) in batches:
        optimizer.zero_grad()
        loss = recipe.contrastive_loss(model, keys, images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def reinforce(recipe: Any, model: Any, batches: Iterator[Any]) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for (start_B,) in batches:
        optimizer.zero_grad()
        loss, _ = recipe.policy_loss(model, start_B)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LOOPS: dict[str, Any] = {"gan": gan, "lbfgs": lbfgs, "wgan_gp": wgan_gp, "moco": moco, "reinforce": reinforce}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow
def test_a_recipe_has_the_losses_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    module = recipe(name)
    trainer = module.make(tmp_path / "ours", progress_bar=False)
    trainer.train()
    ours = [value for value, _ in trainer.storage.history("total_loss").values()]

    fresh = module.make(tmp_path / "plain", progress_bar=False)
    epochs = range(fresh.config.num_epochs)
    batches = [batch for _ in epochs for batch in fresh.train_dataloader]
    state = {"keys": fresh.keys} if name == "moco" else {}
    torch.manual_seed(fresh.config.seed)
    theirs = LOOPS[name](module, fresh.model, iter(batches), **state)
    assert ours == theirs
    assert_equal_weights(trainer.model, fresh.model)


@pytest.mark.exhaustive(every=5)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.slow
def test_a_resumed_recipe_continues_bitwise(name: str, tmp_path: Path) -> None:
    module = recipe(name)
    straight = module.make(tmp_path / "straight", 2, progress_bar=False)
    straight.train()
    module.make(tmp_path / "resumed", 1, progress_bar=False).train()
    resumed = module.make(tmp_path / "resumed", 2, progress_bar=False, resume_from_checkpoint=True)
    resumed.train()
    assert_equal_weights(resumed.model, straight.model)
    if name == "moco":
        assert_equal_weights(resumed.keys, straight.keys)
        assert torch.equal(resumed.keys.queue_QF, straight.keys.queue_QF)

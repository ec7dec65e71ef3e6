"""The recipe of two tasks has the losses and weights of a plain loop."""

import runpy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright.data.seeding import permutation

RECIPE = runpy.run_path(str(Path(__file__).parents[2] / "examples/recipes/multi_task.py"))


def by_hand(num_epochs: int) -> tuple[nn.Module, list[dict[str, float]]]:
    torch.manual_seed(0)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data.astype("float32") / 16), torch.from_numpy(digits.target)
    model, logged = RECIPE["TwoHeads"](), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    torch.manual_seed(42)
    for epoch in range(num_epochs):
        for rows in permutation(1500, 42, epoch).split(50):
            outputs = model(inputs[rows], labels[rows], inputs[rows].mean(dim=1))
            total = outputs["digit_loss"] + outputs["ink_loss"]
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.pop("logits")
            logged.append({"total_loss": total.item(), **{name: value.item() for name, value in outputs.items()}})
    return model, logged


def test_losses_and_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    trainer = RECIPE["main"](str(tmp_path), 2)
    model, logged = by_hand(2)
    for name in logged[0]:
        assert [value for value, _ in trainer.storage.history(name).values()] == [row[name] for row in logged], name
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert trainer.last_eval_results["accuracy"] > 0.5

"""REINFORCE (Williams 1992) in a corridor: the model plays the episodes of each batch in ``compute_loss``.

B episodes, S places, A actions.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import TensorDataset

from trainwright import Trainer, TrainingConfig

PLACES, STEPS = 8, 12


def play(policy: Any, start_B: Tensor) -> tuple[Tensor, Tensor]:
    """Walk left or right until the last place; each step costs 0.1, the goal is worth 1.

    Returns the log-probability and the return of each episode.
    """
    place_B, log_prob_B, return_B = start_B, torch.zeros(len(start_B)), torch.zeros(len(start_B))
    for _ in range(STEPS):
        is_playing_B = place_B < PLACES - 1
        choice = torch.distributions.Categorical(logits=policy(one_hot(place_B, PLACES).float()))
        action_B = choice.sample()
        log_prob_B = log_prob_B + choice.log_prob(action_B) * is_playing_B
        place_B = torch.where(is_playing_B, (place_B + 2 * action_B - 1).clamp(0, PLACES - 1), place_B)
        return_B = return_B + is_playing_B * ((place_B == PLACES - 1).float() - 0.1)
    return log_prob_B, return_B


def policy_loss(policy: Any, start_B: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a batch of episodes, with the mean return as its baseline, and that mean."""
    log_prob_B, return_B = play(policy, start_B)
    return -(log_prob_B * (return_B - return_B.mean())).mean(), return_B.mean()


class Reinforce(Trainer):
    def compute_loss(self, model: Any, inputs: Any) -> Tensor:
        loss, mean_return = policy_loss(model, inputs[0])
        self.storage.put_scalar("return", mean_return)
        return loss


def make(folder: str, num_epochs: int = 3, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(PLACES, 16), nn.Tanh(), nn.Linear(16, 2))
    starts = TensorDataset(torch.arange(640) % (PLACES - 1))  # the first place of each episode
    config = TrainingConfig(
        output_dir=folder,
        num_epochs=num_epochs,
        batch_size=32,
        eval_strategy="no",
        metrics=[],
        lr_scheduler_type=None,
        **settings,
    )
    return Reinforce(policy, config, starts, optimizer=torch.optim.Adam(policy.parameters(), lr=1e-2))


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "reinforce").train()

"""A gradient scaler that decides with other processes, also for fused optimizers.

torch's ``ShardedGradScaler`` marks infinite gradients in a tensor of shape (1,); fused optimizers take one of shape ().
"""

from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class SharedGradScaler(ShardedGradScaler):
    """All processes skip an update if one of them has infinite gradients."""

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*arguments, **options)
        return {device: is_infinite.reshape(()) for device, is_infinite in found.items()}

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients; 1 in ``found_inf`` says that a process has infinite ones.

        Torch adds the marks of the processes up, and fused optimizers skip only for a sum of 1.
        """
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.clamp_(max=1.0)

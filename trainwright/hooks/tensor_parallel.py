"""What tensor parallel needs during a training: the loss of scores that stay apart, and one check of the gradients."""

from contextlib import ExitStack
from typing import Any

from trainwright.base.dist import get_tensor_parallel_size
from trainwright.hooks.base import HookBase
from trainwright.optim.named import each_optimizer
from trainwright.parallel.mesh import current_mesh


class TensorParallel(HookBase):
    """Cross-entropy adds up the parts of the tensor-parallel processes during the training.

    Before the first update the gradients of the parameters that each of these processes holds are compared
    (:func:`~trainwright.parallel.tensor.check_replicas`).
    """

    slot = "prepare"
    changes_process = True

    def __init__(self) -> None:
        self._loss, self._check_once = ExitStack(), ExitStack()
        self._is_checked = False

    def before_train(self) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        self.after_train()  # of a training that failed before its end
        self._loss.enter_context(loss_parallel())
        self._is_checked = False
        first, *_ = each_optimizer(self.trainer.optimizer)
        self._check_once.callback(first.register_step_pre_hook(self._check).remove)

    def after_step(self) -> None:
        if self._is_checked:  # not in the check: torch still reads the hooks of the optimizer there
            self._check_once.close()

    def after_train(self) -> None:
        self._check_once.close()
        self._loss.close()

    def _check(self, *_: Any) -> None:
        from trainwright.parallel.tensor import check_replicas

        if self._is_checked:
            return
        self._is_checked = True
        mesh = current_mesh()
        assert mesh is not None, "tensor parallel has one"
        check_replicas(self.trainer.model, mesh.device_mesh["tp"])


def tensor_parallel_hook() -> TensorParallel | None:
    """The hook of the current layout; None: it has no tensor parallel."""
    return TensorParallel() if get_tensor_parallel_size() > 1 else None

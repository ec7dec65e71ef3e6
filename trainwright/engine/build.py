"""``build_run``: the only place where the parts of a run are made and joined, for both APIs."""

import logging
from functools import partial

import torch

from trainwright._torch_compat.probing import real_tensors
from trainwright.base.errors import ConfigError
from trainwright.config.rules import without_effect
from trainwright.data.same_samples import check_first_reads
from trainwright.engine.best_weights import BestWeights
from trainwright.engine.run import Run
from trainwright.engine.run_hooks import run_hooks
from trainwright.parallel.precision import autocast_and_scaler

logger = logging.getLogger("trainwright.engine")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_run(run: Run) -> None:
    """Build the parts of ``run`` in the order in which they need each other.

    A part that differs between the APIs, or that a method of the user's makes, is built by a method of the run.
    """
    run.folder.recover()
    with real_tensors():  # in an estimate, too
        run.build_data()
    run.check_data()
    run.build_model()
    for sentence in without_effect(run.spec):
        logger.warning("%s", sentence)
    use_precision(run)
    run.place()
    run.build_optimizers()
    run.build_checkpointer()
    run.best_weights = BestWeights(run)
    run.build_calls()
    run.build_step()
    run.batches.compare_reads = partial(check_first_reads, next(iter(run.train_data())))
    run.resume()
    run.fill_weights()
    run.prepare_folder()
    run.watch_hardest()
    run.trainer.register_hooks(run_hooks(run))
    run.own_hooks = tuple(run.hooks)
    run.settings_read = run.settings_now()


def use_precision(run: Run) -> None:
    """Build the context of ``mixed_precision``, and the gradient scaler of float16."""
    spec, dtype = run.spec, _DTYPES.get(run.spec.mixed_precision or "")
    if dtype is torch.bfloat16 and run.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"{spec.where('mixed_precision')}: got 'bf16', which this GPU does not support; use 'fp16' or None."
        )
    run.autocast, run.grad_scaler = (None, None) if dtype is None else autocast_and_scaler(run.device, dtype)

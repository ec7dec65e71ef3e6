"""Which samples an update used: computed from the sampler, so that nothing is recorded in a step."""

import logging
from pathlib import Path
from typing import Any

from trainwright.config.errors import ConfigError
from trainwright.data.sample_names import shown_samples
from trainwright.data.sampler import CyclicSampler, EpochSampler
from trainwright.engine.folder.formats import RECORD_NAME, read_starts
from trainwright.hooks.method_overrides import is_overridden
from trainwright.parallel.dist import get_data_parallel_rank, get_data_parallel_size

logger = logging.getLogger("trainwright.engine")


def sample_ids(trainer: Any, update: int) -> list[list[int]] | None:
    """What the trainer's method of this name returns."""
    if not 1 <= update <= trainer.max_iter:
        raise ConfigError(f"sample_ids: got update {update}; the run has the updates 1 to {trainer.max_iter:,}.")
    first = update - 1
    sampler = getattr(training_loader(trainer), "batch_sampler", None)
    if first < trainer.start_iter:
        _check_earlier_starts(trainer, update)
    if not isinstance(sampler, CyclicSampler | EpochSampler) or _reads_itself(trainer):
        return None
    is_by_config = hasattr(trainer, "cfg")
    if isinstance(sampler, EpochSampler) is is_by_config:  # the user's own, which the trainer does not position
        return None
    if not is_by_config:
        plan = trainer.state.plan
        done = plan.steps(first)
        return sampler.micro_batches(done, plan.steps(update) - done)
    done = trainer.samples_done + (first - trainer.iterations_done) * trainer.samples_per_iter
    return sampler.micro_batches(done, trainer.cfg.train.num_accumulation_steps)


def own_sample_ids(trainer: Any, update: int) -> list[list[int]] | None:
    """The samples of this process: its consecutive share of each micro-batch, as the samplers deal them out."""
    batches, rank, size = sample_ids(trainer, update), get_data_parallel_rank(), get_data_parallel_size()
    if batches is None:
        return None
    shares = []
    for batch in batches:
        each, more = divmod(len(batch), size)
        first = rank * each + min(rank, more)
        shares.append(batch[first : first + each + (rank < more)])
    return shares


def described_samples(trainer: Any, update: int) -> str:
    """Sentences that name the samples of an update and how to look at each of them; empty if they are unknown."""
    ids = sample_ids(trainer, update) if hasattr(trainer, "replay") else None
    if ids is None:
        return ""
    indices = [index for batch in ids for index in batch]
    try:
        shown = shown_samples(training_loader(trainer).dataset, indices)
    except Exception as error:  # of the data set's own code: the message is about something else
        logger.debug("The data set has failed to name its samples: %r", error)
        shown = shown_samples(None, indices)
    if hasattr(trainer, "cfg"):
        how = f"`trainwright replay {trainer.cfg.train.output_dir} --step {update}`"
    else:
        how = f"trainer.replay({update}), in place of trainer.train(),"
    return f"Samples of update {update}: {shown}. {how} shows the loss of each."


def training_loader(trainer: Any) -> Any:
    """The loader of the training data; None: the trainer has none."""
    loader = getattr(trainer, "train_loader", None)
    return loader if loader is not None else getattr(trainer, "train_dataloader", None)


def _reads_itself(trainer: Any) -> bool:
    """Whether the user's code reads the batches, perhaps others than the plan says."""
    if hasattr(trainer, "cfg"):
        stepper = trainer._built_stepper
        is_replaced = trainer._trainer is not stepper
        return is_replaced or is_overridden(stepper, "run_step") or is_overridden(trainer, "run_step")
    return is_overridden(trainer, "run_step") or is_overridden(trainer, "inner_training_loop")


def _check_earlier_starts(trainer: Any, update: int) -> None:
    """Raise if updates before this start may have had other sizes."""
    config = getattr(trainer, "config", None)
    folder = trainer.output_dir if config is not None else trainer.cfg.train.output_dir
    sizes = {start.get("samples_per_iteration") for start in read_starts(Path(folder) / RECORD_NAME)}
    if len(sizes) > 1:
        raise ConfigError(
            f"sample_ids: update {update} is of an earlier start of the run, and its starts had"
            f" {' and '.join(str(size) for size in sorted(sizes, key=str))} samples per update, so the samples of"
            " earlier updates are unknown."
        )

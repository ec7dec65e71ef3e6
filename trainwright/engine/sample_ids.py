"""Which samples an update used: computed from the sampler, so that nothing is recorded in a step."""

import logging

from trainwright.config.errors import ConfigError
from trainwright.data.sample_names import shown_samples
from trainwright.engine.folder.formats import RECORD_NAME, read_starts
from trainwright.engine.run import Run
from trainwright.parallel.dist import get_data_parallel_rank, get_data_parallel_size

logger = logging.getLogger("trainwright.engine")


def sample_ids(run: Run, update: int) -> list[list[int]] | None:
    """What the trainer's method of this name returns."""
    trainer = run.trainer
    if not 1 <= update <= trainer.max_iter:
        raise ConfigError(f"sample_ids: got update {update}; the run has the updates 1 to {trainer.max_iter:,}.")
    if update <= trainer.start_iter:
        _check_earlier_starts(run, update)
    found = run.calls.position_of(update)
    ids: list[list[int]] | None = None if found is None else run.batches.loader.batch_sampler.micro_batches(*found)
    return ids


def own_sample_ids(run: Run, update: int) -> list[list[int]] | None:
    """The samples of this process: its consecutive share of each micro-batch, as the samplers deal them out."""
    batches, rank, size = sample_ids(run, update), get_data_parallel_rank(), get_data_parallel_size()
    if batches is None:
        return None
    shares = []
    for batch in batches:
        each, more = divmod(len(batch), size)
        first = rank * each + min(rank, more)
        shares.append(batch[first : first + each + (rank < more)])
    return shares


def described_samples(run: Run, update: int) -> str:
    """Sentences that name the samples of an update and how to look at each of them; empty if they are unknown."""
    ids = sample_ids(run, update)
    if ids is None:
        return ""
    indices = [index for batch in ids for index in batch]
    try:
        shown = shown_samples(run.batches.loader.dataset, indices)
    except Exception as error:  # of the data set's own code: the message is about something else
        logger.debug("The data set has failed to name its samples: %r", error)
        shown = shown_samples(None, indices)
    if run.spec.api == "config file":
        how = f"`trainwright replay {run.spec.saving.output_dir} --step {update}`"
    else:
        how = f"trainer.replay({update}), in place of trainer.train(),"
    return f"Samples of update {update}: {shown}. {how} shows the loss of each."


def _check_earlier_starts(run: Run, update: int) -> None:
    """Raise if updates before this start may have had other sizes."""
    sizes = {start.get("samples_per_iteration") for start in read_starts(run.folder.path / RECORD_NAME)}
    if len(sizes) > 1:
        raise ConfigError(
            f"sample_ids: update {update} is of an earlier start of the run, and its starts had"
            f" {' and '.join(str(size) for size in sorted(sizes, key=str))} samples per update, so the samples of"
            " earlier updates are unknown."
        )

"""The weights that a new run starts with: those of a folder, a checkpoint, a file or a model on the hub."""

from trainwright.base.dist import raised_together
from trainwright.base.errors import MissingFileError
from trainwright.checkpoint.checkpointer import Checkpointer
from trainwright.checkpoint.errors import CheckpointError, PartialWeightsError
from trainwright.config.spec import RunSpec


def load_initial_weights(spec: RunSpec, checkpointer: Checkpointer) -> None:
    """Load the weights of ``init_weights_from``, if it is set. Every process must call this.

    Raises:
        MissingFileError: there is no such folder or file, or no weights in it.
        PartialWeightsError: it lacks weights that are not those of a new head, and ``init_weights_partial`` is not set.
        CheckpointError: none of the weights fits, or they are damaged.
    """
    if spec.init_weights_from is None:
        return
    from trainwright.models.folder import weights_to_load  # most runs need no hub

    try:
        with raised_together():
            path = weights_to_load(spec.init_weights_from)
        checkpointer.load(path, checkpointables=[], partial=spec.init_weights_partial)
    except MissingFileError as error:
        raise MissingFileError(f"{spec.where('init_weights_from')}: {error}") from error
    except PartialWeightsError as error:
        raise PartialWeightsError(
            f"{spec.where('init_weights_from')}: {error}\n"
            f"To start from what fits, set {spec.where('init_weights_partial')} = True."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{spec.where('init_weights_from')}: {error}") from error

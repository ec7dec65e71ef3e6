"""What callbacks ask of the training."""

from dataclasses import dataclass


@dataclass
class TrainerControl:
    """A callback sets a flag; the training acts on it at the end of the iteration, and clears it.

    Attributes:
        should_training_stop: this iteration is the last one. What belongs to the end of a training follows.
        should_epoch_stop: the rest of the epoch is left out, where the trainer can do that.
        should_save: save a checkpoint, between this iteration and the next.
        should_evaluate: evaluate now.
        should_log: write the metrics now.
        save_dir: the folder of what ``should_save`` saves; None: where the run's own checkpoints are.
        has_failed: not a wish: in ``on_train_end``, whether the training has ended before its last iteration was done.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    save_dir: str | None = None
    has_failed: bool = False

    def reset(self) -> None:
        """As new, for a training that begins."""
        self.should_training_stop = self.should_epoch_stop = False
        self.should_save = self.should_evaluate = self.should_log = self.has_failed = False
        self.save_dir = None

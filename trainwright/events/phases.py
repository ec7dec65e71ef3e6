"""Where the time of a training goes."""

from dataclasses import dataclass


@dataclass(slots=True)
class PhaseTimes:
    """Seconds that the process which trains has spent in each phase, since the training began.

    ``data``: waiting for a batch and bringing it to the device. ``forward``, ``backward``, ``optimizer``: of the step;
    ``forward`` holds all of a step that nobody divides (a graph, a step of the user's own). ``hooks``: all that comes
    between two steps, ``evaluation`` and ``save`` included, which are also counted by themselves.

    On an accelerator these are times of the host, which runs ahead of it.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    hooks: float = 0.0
    evaluation: float = 0.0
    save: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.data + self.forward + self.backward + self.optimizer + self.hooks

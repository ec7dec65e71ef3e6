"""The base class of operators: a model that is trained and called through one object."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from trainwright.config import TrainingConfig
    from trainwright.engine import Trainer


class NNOperator:
    """Subclass it: set ``self.model`` in ``__init__``, and implement ``__call__``.

    >>> class Score(NNOperator):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.model = nn.Linear(4, 2)
    >>> Score().model.out_features
    2

    Attributes:
        framework: the framework of the model.
    """

    def __init__(self, framework: str = "pytorch") -> None:
        self.framework = framework
        self._model: nn.Module | None = None
        self._trainer: Trainer | None = None

    @property
    def model(self) -> nn.Module:
        """The trained model.

        Raises:
            AttributeError: the operator has not set it.
        """
        if self._model is None:
            raise AttributeError(f"{type(self).__name__}.model: not set; set self.model in __init__.")
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model
        self._trainer = None  # it belongs to the previous model

    @property
    def trainer(self) -> "Trainer":
        """The trainer of the latest :meth:`setup_trainer` or :meth:`train`.

        Raises:
            AttributeError: neither was called.
        """
        if self._trainer is None:
            raise AttributeError(f"{type(self).__name__}.trainer: none yet; call train(...) or setup_trainer(...).")
        return self._trainer

    def setup_trainer(
        self,
        training_config: "TrainingConfig | None" = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> "Trainer":
        """Build the :class:`~trainwright.Trainer` of this operator; ``options`` are its further arguments."""
        from trainwright.engine import Trainer

        self._trainer = Trainer(self.model, training_config, train_dataset, eval_dataset, **options)
        return self._trainer

    def train(
        self,
        training_config: "TrainingConfig | None" = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        resume_checkpoint_path: str | Path | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Train the model and return the results of the last evaluation. The operator then uses the trained model."""
        trainer = self.setup_trainer(training_config, train_dataset, eval_dataset, **options)
        results = trainer.train(resume_checkpoint_path)
        self.model.eval()
        return results

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Save the training state, with the model, as a checkpoint folder."""
        self.trainer.save(path, overwrite)

    def load(self, path: str | Path) -> None:
        """Load the model's weights from a checkpoint folder.

        Raises:
            CheckpointError: they belong to another model, or are damaged.
        """
        from trainwright.checkpoint import Checkpointer

        Checkpointer(self.model).load(Path(path), checkpointables=[], strict=True)

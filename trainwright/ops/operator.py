"""The base of operators: something with a model that can be trained where it is used."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from trainwright.config import TrainingConfig
    from trainwright.engine import Trainer


class NNOperator:
    """Subclass it: set ``self.model`` in ``__init__``, and do the work in ``__call__``.

    >>> class Score(NNOperator):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.model = nn.Linear(4, 2)
    >>> Score().model.out_features
    2

    Attributes:
        framework: what the model is written in.
    """

    def __init__(self, framework: str = "pytorch") -> None:
        self.framework = framework
        self._model: nn.Module | None = None
        self._trainer: Trainer | None = None

    @property
    def model(self) -> nn.Module:
        """What is trained.

        Raises:
            AttributeError: the operator has set none.
        """
        if self._model is None:
            raise AttributeError(f"{type(self).__name__}.model: not set; set self.model in __init__.")
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model
        self._trainer = None  # of the model before

    @property
    def trainer(self) -> "Trainer":
        """The trainer of the newest :meth:`setup_trainer` or :meth:`train`.

        Raises:
            AttributeError: there was none yet.
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
        """Make the :class:`~trainwright.Trainer` of this operator; ``options`` are further arguments of it."""
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
        """Train the model, and give the results of the last evaluation. The operator goes on with what was learned."""
        trainer = self.setup_trainer(training_config, train_dataset, eval_dataset, **options)
        results = trainer.train(resume_checkpoint_path)
        self.model.eval()
        return results

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Write the state of the training, model included, as a checkpoint folder."""
        self.trainer.save(path, overwrite)

    def load(self, path: str | Path) -> None:
        """Take the model's weights from a checkpoint folder.

        Raises:
            CheckpointError: they are those of another model, or damaged.
        """
        from trainwright.checkpoint import Checkpointer

        Checkpointer(self.model).load(Path(path), checkpointables=[], strict=True)

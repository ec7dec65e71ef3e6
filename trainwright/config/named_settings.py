"""Settings of either API as attributes, by the names of ``TrainingConfig``, with the names that the user gives them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

Api = Literal["Python", "config file"]


class NamedSettings:
    """They are immutable.

    Attributes:
        api: whose settings they are.
    """

    api: Api

    def __init__(
        self,
        api: Api,
        settings: Mapping[str, Any],
        name_of: Callable[[str], str],
        is_set: Callable[[str], bool],
    ) -> None:
        """
        Args:
            name_of, is_set: of a setting: the name that the user gives it, and whether the user set it.
        """
        vars(self).update(settings, api=api, _name_of=name_of, _is_set=is_set)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: the settings of a run are immutable.")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def is_set(self, name: str) -> bool:
        """Whether the user set the setting; in most keys of a config file, to another value than the default."""
        is_set: bool = vars(self)["_is_set"](name)
        return is_set

    def name_of(self, name: str) -> str:
        """The setting as the user writes it: ``batch_size``, or in a config file ``train.train_micro_batch_size``."""
        own: str = vars(self)["_name_of"](name)
        return own

    def where(self, name: str) -> str:
        """:meth:`name_of`, as the beginning of a message."""
        return f"TrainingConfig.{self.name_of(name)}" if self.api == "Python" else self.name_of(name)

"""``MetricConfig``, and the read-only form of values that a configuration contains."""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainwright.base.errors import ConfigTypeError, error_of
from trainwright.config.validation import Allowed, faults_of
from trainwright.config.yaml_file import plain

_READ_ONLY = "This {} belongs to a configuration, which checks every change: assign a new one, for example config.{}."


class ReadOnlyDict(dict[str, Any]):
    """A read-only dict. A copy is a plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        example = "early_stopping = {'patience': 2}"
        raise ConfigTypeError(_READ_ONLY.format("dict", example))

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A read-only list. A copy is a plain list."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigTypeError(_READ_ONLY.format("list", "metrics = [*config.metrics, 'F1Score']"))

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)


def read_only(value: Any) -> Any:
    """``value`` with read-only dicts and lists."""
    if isinstance(value, dict):
        return ReadOnlyDict({key: read_only(item) for key, item in value.items()})
    if isinstance(value, list):
        return ReadOnlyList([read_only(item) for item in value])
    return value


class MetricConfig(BaseModel):
    """A metric by name, with settings of its results and arguments of the metric. It is immutable.

    ``MetricConfig("rouge", output_keys=["rouge1"])``; ``MetricConfig("Accuracy", top_k=5)``.

    Attributes:
        objective: the better direction; None: that of the metric.
        output_keys: the results to report; None: all.
        n_decimals: digits after the decimal point of the results.
        arguments: the arguments of the metric.

    Raises:
        ConfigError: a setting is wrong; the message lists all faults.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, description="The metric."), Allowed("the name of a metric")]
    objective: Annotated[
        Literal["maximize", "minimize"] | None,
        Field(description="The better direction; None: that of the metric."),
        Allowed("'maximize', 'minimize' or None"),
    ] = None
    output_keys: Annotated[
        list[str] | None,
        Field(description="The results to report; None: all."),
        Allowed("a list of names, or None"),
    ] = None
    n_decimals: Annotated[
        int,
        Field(ge=0, description="Digits after the decimal point of the results."),
        Allowed("a whole number >= 0"),
    ] = 4

    def __init__(self, name: Any = None, /, **values: Any) -> None:
        if name is not None:
            values["name"] = name
        if "name_" in values:  # the spelling for an optimizer or a loss with arguments
            values.setdefault("name", values.pop("name_"))
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            faults = faults_of(error, type(self), values)
            raise error_of(faults, "\n".join(f"MetricConfig.{fault}" for fault in faults)) from None
        for holder in (self.__dict__, self.__pydantic_extra__ or {}):
            holder.update({key: read_only(value) for key, value in holder.items()})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the metric."""
        return dict(self.__pydantic_extra__ or {})

    def to_dict(self) -> dict[str, Any]:
        """The name and the settings that differ from their defaults, as plain values."""
        shown = {key: value for key, value in self.__dict__.items() if value != type(self).model_fields[key].default}
        found: dict[str, Any] = plain({**shown, **self.arguments})
        return found

    def __repr__(self) -> str:
        return f"MetricConfig({', '.join(f'{key}={value!r}' for key, value in self.to_dict().items())})"

    __str__ = __repr__

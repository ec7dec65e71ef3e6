"""How one metric is computed and shown."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainwright.config.errors import ConfigError, did_you_mean
from trainwright.config.training.read_only import plain, read_only

_ALLOWED = {
    "name": "the name of a metric",
    "objective": "'maximize', 'minimize' or None",
    "output_keys": "a list of names, or None",
    "n_decimals": "a whole number >= 0",
}


class MetricConfig(BaseModel):
    """A metric by its name, with what is to be done with its results and any arguments that the metric itself takes.

    ``MetricConfig("rouge", output_keys=["rouge1"])``; ``MetricConfig("Accuracy", top_k=5)``. It cannot be changed.

    Attributes:
        objective: which direction is better; None: the metric's own.
        output_keys: those of its results that are wanted; None: all.
        n_decimals: digits after the point that results are rounded to.
        arguments: what the metric itself is given.

    Raises:
        ConfigError: something is wrong; the message lists every fault.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, description="The metric.")]
    objective: Annotated[
        Literal["maximize", "minimize"] | None, Field(description="Which direction is better; None: the metric's own.")
    ] = None
    output_keys: Annotated[list[str] | None, Field(description="Those of its results that are wanted; None: all.")] = (
        None
    )
    n_decimals: Annotated[int, Field(ge=0, description="Digits after the point that results are rounded to.")] = 4

    def __init__(self, name: Any = None, /, **values: Any) -> None:
        if name is not None:
            values["name"] = name
        if "name_" in values:  # as the name of an optimizer or a loss with arguments is spelled
            values.setdefault("name", values.pop("name_"))
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            raise ConfigError("\n".join(_faults(error, values))) from None
        for holder in (self.__dict__, self.__pydantic_extra__ or {}):
            holder.update({key: read_only(value) for key, value in holder.items()})

    @property
    def arguments(self) -> dict[str, Any]:
        """What the metric itself is given."""
        return dict(self.__pydantic_extra__ or {})

    def to_dict(self) -> dict[str, Any]:
        """The name, and what differs from the defaults, as plain values."""
        shown = {key: value for key, value in self.__dict__.items() if value != type(self).model_fields[key].default}
        found: dict[str, Any] = plain({**shown, **self.arguments})
        return found

    def __repr__(self) -> str:
        return f"MetricConfig({', '.join(f'{key}={value!r}' for key, value in self.to_dict().items())})"

    __str__ = __repr__


def _faults(error: ValidationError, values: dict[str, Any]) -> list[str]:
    faults = {}
    for entry in error.errors(include_url=False):
        field = str(entry["loc"][0])
        if entry["type"] == "missing":
            near = did_you_mean("name", values) if values else ""
            faults[field] = f"MetricConfig.{field}: missing; it is {_ALLOWED[field]}. {near if 'mean' in near else ''}"
        else:
            got = f"got {values[field]!r} ({type(values[field]).__name__})"
            faults[field] = f"MetricConfig.{field}: {got}; it must be {_ALLOWED[field]}."
    return [fault.strip() for fault in faults.values()]

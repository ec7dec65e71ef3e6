"""The validator of all configurations: one fault for each wrong value, with its path and the allowed values."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError, with_config
from typing_extensions import TypedDict

from trainwright.config import ConfigError, ConfigTypeError
from trainwright.config.errors import error_of
from trainwright.config.validation import (
    Allowed,
    Amount,
    Count,
    ProfileOrNone,
    StepsOrFraction,
    faults_of,
    section_faults,
)


class Inner(TypedDict, total=False):
    enabled: bool
    period: Count


@with_config(ConfigDict(extra="forbid", strict=True))
class Outer(TypedDict, total=False):
    seed: Count
    steps: StepsOrFraction
    amount: Amount
    names: Annotated[list[str] | None, Allowed("a list of names, or None")]
    numbers: Annotated[list[int] | None, Allowed("a list of numbers, or None")]
    profile: ProfileOrNone
    inner: Inner


def faults(**values: Any) -> dict[str, tuple[str, type[ConfigError]]]:
    return {fault.path: (fault.text, fault.kind) for fault in section_faults(Outer, values)}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seed": 1, "steps": 0.5, "inner": {"enabled": True, "period": 1}},
        *({"amount": amount} for amount in (1, 1e9, float("inf"))),
        *({"profile": profile} for profile in (True, False, None, {}, {"wait": 0, "active": 2})),
        *({"steps": steps} for steps in (None, 1, 1.0)),
    ],
)
def test_allowed_values_have_no_faults(values: dict[str, Any]) -> None:
    assert faults(**values) == {}


@pytest.mark.parametrize(
    ("values", "path", "text", "kind"),
    [
        ({"steps": "x"}, "steps", "got 'x' (str); it must be a whole number >= 1, a fraction", ConfigTypeError),
        ({"steps": 0}, "steps", "got 0 (int); it must be a whole number >= 1, a fraction", ConfigError),
        ({"amount": 2.5}, "amount", "got 2.5 (float); it must be a whole number >= 1", ConfigError),
        ({"names": "x"}, "names", "got 'x' (str); it must be a list of names, or None. Write ['x'].", ConfigTypeError),
        ({"profile": {"wait": -1}}, "profile.wait", "got -1 (int); it must be a whole number >= 0.", ConfigError),
        ({"profile": "x"}, "profile", "got 'x' (str); it must be True, False, a dict", ConfigTypeError),
    ],
)
def test_a_fault_has_path_value_allowed_values_and_kind(
    values: dict[str, Any], path: str, text: str, kind: type[ConfigError]
) -> None:
    found = faults(**values)
    assert list(found) == [path]
    assert text in found[path][0]
    assert found[path][1] is kind


def test_a_list_is_suggested_only_where_one_of_texts_is_allowed() -> None:
    assert faults(numbers="3") == {
        "numbers": ("got '3' (str); it must be a list of numbers, or None.", ConfigTypeError)
    }


def test_all_faults_are_found_at_once_and_share_a_class_if_they_can() -> None:
    found = section_faults(Outer, {"seed": "x", "inner": {"enabled": 1, "period": "y"}})
    assert [fault.path for fault in found] == ["seed", "inner.enabled", "inner.period"]
    assert type(error_of(found, "message")) is ConfigTypeError
    assert type(error_of([*found, *section_faults(Outer, {"seed": 0})], "message")) is ConfigError


def test_a_missing_value_of_a_model_is_reported_with_the_nearest_name() -> None:
    class Model(BaseModel):
        model_config = ConfigDict(extra="allow")
        name: Annotated[str, Allowed("the name of a thing")]

    values = {"nmae": "x"}
    with pytest.raises(ValidationError) as caught:
        Model(**values)  # type: ignore[arg-type]
    (fault,) = faults_of(caught.value, Model, values)
    assert all(fact in str(fault) for fact in ("name: missing", "the name of a thing", "'nmae'"))

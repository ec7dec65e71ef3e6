"""The level of the library's log lines."""

import logging
from collections.abc import Iterator

import pytest

from trainwright.engine.logs import log_to_console

LIBRARY = logging.getLogger("trainwright")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    level, handlers = LIBRARY.level, list(LIBRARY.handlers)
    yield
    LIBRARY.setLevel(level)
    LIBRARY.handlers[:] = handlers


@pytest.mark.parametrize(
    ("level", "stays"), [(logging.NOTSET, logging.INFO), (logging.ERROR, logging.ERROR), (logging.DEBUG, logging.DEBUG)]
)
def test_a_level_that_the_user_has_set_stays(level: int, stays: int) -> None:
    LIBRARY.setLevel(level)
    log_to_console()
    assert LIBRARY.level == stays

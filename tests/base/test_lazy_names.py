"""Names that load their file on first use."""

import gc
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trainwright.base.lazy_names import PUBLIC, names_of, on_first_use
from trainwright.events.phases import PhaseTimes


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package with an empty namespace, whose names are in trainwright.base."""
    module = types.ModuleType("trainwright.base")
    monkeypatch.setitem(sys.modules, "trainwright.base", module)
    return module


NAMES = {
    "ConfigError": "trainwright.base.errors",
    "UserError": "trainwright.base.errors",
    "PhaseTimes": "trainwright.events.phases",
    "errors": "trainwright.base",
}


def test_a_name_is_loaded_once_and_found_directly_from_then_on(room: types.ModuleType) -> None:
    get = on_first_use("trainwright.base", NAMES)
    errors = sys.modules["trainwright.base.errors"]
    assert get("ConfigError") is errors.ConfigError
    assert get("PhaseTimes") is PhaseTimes  # a file of another room
    assert get("errors") is errors  # the file itself
    assert vars(room)["ConfigError"] is errors.ConfigError
    assert "UserError" not in vars(room)


def test_an_unknown_name_is_an_attribute_error(room: types.ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"module 'trainwright\.base' has no attribute 'Absent'"):
        on_first_use("trainwright.base", NAMES)("Absent")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was_also_by_a_failed_import(
    room: types.ModuleType, was_enabled: bool
) -> None:
    get = on_first_use("trainwright.base", {"Name": "trainwright.base.absent_file"})
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ModuleNotFoundError, match="absent_file"):
            get("Name")
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_an_import_that_fails_names_its_cause(tmp_path: Path) -> None:
    (tmp_path / "logging.py").write_text("")  # hides that of Python
    (tmp_path / "program.py").write_text("from trainwright import Trainer")
    found = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=False)
    assert "ImportError" in found.stderr.splitlines()[-1]
    assert "module 'logging' has no attribute 'getLogger'" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["trainwright", *(f"trainwright.{one}" for one in PUBLIC)])
def test_the_names_of_a_package_are_those_of_its_list(package: str) -> None:
    names = [name for name in importlib.import_module(package).__all__ if not name.startswith("_")]
    assert list(names_of(package)) == names


def test_the_hint_for_a_missing_name_imports_no_other_package() -> None:
    program = (
        "import sys, trainwright.events as events; before = {*sys.modules}; assert not hasattr(events, 'CallBack');"
        "print(*(one for one in {*sys.modules} - before if one.startswith('trainwright')))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("name", ["__path__", "__wrapped__", "Runs"])
def test_an_unknown_name_of_a_module_that_is_no_package_is_an_attribute_error(name: str) -> None:
    import trainwright.report

    with pytest.raises(AttributeError, match=rf"module 'trainwright\.report' has no attribute '{name}'"):
        getattr(trainwright.report, name)

"""A deprecated name works and warns once, at the line of the caller; it is gone two minor versions later."""

import ast
import warnings
from pathlib import Path

import pytest
from omegaconf import DictConfig

import trainwright
from trainwright import LazyConfig, TrainingConfig, get_config
from trainwright.base import deprecation
from trainwright.base.deprecation import deprecated, removed_in
from trainwright.config.config_file.sections import complete

PACKAGE = Path(trainwright.__file__).parent


@deprecated("0.3", use="add(a, b)")
def add_up(a: int, b: int = 1) -> int:
    """The sum."""
    return a + b


@deprecated("0.3", use="Adder")
class Sum:
    def __init__(self, a: int) -> None:
        self.a = a

    @deprecated("1.9", use="a")
    def value(self) -> int:
        return self.a


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two aliases as if they were names of an earlier version."""
    monkeypatch.setattr(deprecation, "SETTINGS", {"lr": "0.1", "train.recompute_grad": "0.1"})
    monkeypatch.setattr(deprecation, "_warned", set())


def test_a_function_works_and_warns_at_the_line_of_the_caller() -> None:
    with pytest.warns(FutureWarning) as caught:
        assert add_up(1, b=2) == 3
    (warning,) = caught
    assert str(warning.message) == "add_up is deprecated since version 0.3 and is removed in 0.5. Use add(a, b)."
    assert warning.filename == __file__
    assert (add_up.__name__, add_up.__doc__) == ("add_up", "The sum.")


def test_a_call_in_a_loop_warns_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert [add_up(number) for number in range(5)] == [1, 2, 3, 4, 5]
    assert len(caught) == 1


def test_a_class_and_a_method_warn_too() -> None:
    with pytest.warns(FutureWarning, match=r"^Sum is deprecated since version 0\.3 and is removed in 0\.5\. Use Adder"):
        total = Sum(3)
    with pytest.warns(FutureWarning, match=r"^Sum\.value is deprecated since version 1\.9 and is removed in 1\.11"):
        assert total.value() == 3
    with pytest.raises(FutureWarning):  # an error where the user has asked for one
        Sum(3)


@pytest.mark.usefixtures("settings")
def test_a_setting_works_by_its_earlier_name_and_warns_once(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as caught:
        config = TrainingConfig(lr=0.25)
    assert config.learning_rate == config.lr == 0.25
    (warning,) = caught
    assert str(warning.message) == "lr is deprecated since version 0.1 and is removed in 0.3. Use learning_rate."
    assert warning.filename == __file__
    (tmp_path / "old.yaml").write_text("learning:\n  lr: 0.5\n")
    assert TrainingConfig.load_from_yaml(tmp_path / "old.yaml").learning_rate == 0.5  # once in a process
    TrainingConfig(learning_rate=0.5)


@pytest.mark.usefixtures("settings")
def test_the_current_name_of_a_setting_does_not_warn() -> None:
    assert TrainingConfig(learning_rate=0.5).copy_with(batch_size=2).learning_rate == 0.5


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("place", ["file", "override"])
def test_a_key_of_a_config_file_works_by_its_earlier_name_and_warns_once(place: str) -> None:
    def completed() -> DictConfig:
        cfg = get_config("common/defaults.py")
        if place == "file":
            cfg.train.recompute_grad = {"enabled": True}
        else:
            LazyConfig.apply_overrides(cfg, ["train.recompute_grad.enabled=true"])
        return complete(cfg)

    with pytest.warns(FutureWarning) as caught:
        assert completed().train.activation_checkpoint.enabled is True
    (warning,) = caught
    name, use = "train.recompute_grad", "train.activation_checkpoint"
    assert str(warning.message) == f"{name} is deprecated since version 0.1 and is removed in 0.3. Use {use}."


def deprecated_names(folder: Path = PACKAGE) -> dict[str, str]:
    """All of the package, and the version that deprecated each."""
    found = dict(deprecation.SETTINGS)
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("deprecated"):
                    found[getattr(node, "name", "")] = ast.literal_eval(call.args[0])
    return found


def test_no_name_has_stayed_too_long() -> None:
    here = deprecated_names(Path(__file__).parent)
    assert {"add_up": "0.3", "Sum": "0.3", "value": "1.9"}.items() <= here.items()  # they are found
    version = [int(part) for part in trainwright.__version__.split(".")[:2]]
    for name, since in deprecated_names().items():
        gone = [int(part) for part in removed_in(since).split(".")]
        assert version < gone, f"{name} was to be removed in {removed_in(since)}"


def test_each_deprecated_setting_is_an_alias() -> None:
    from trainwright.config.lazy.overrides import CANONICAL

    for name in [*deprecation.SETTINGS, "lr", "train.recompute_grad"]:  # two aliases, while none is deprecated
        assert name.removeprefix("train.") in {*CANONICAL} if "." in name else name in TrainingConfig.aliases

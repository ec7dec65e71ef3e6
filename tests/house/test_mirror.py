"""The tests of ``trainwright/a/b.py`` are in ``tests/a/test_b.py``: a reader finds them by name."""

import ast
from pathlib import Path

import pytest

import trainwright

PACKAGE = Path(trainwright.__file__).parent
TESTS = Path(__file__).parents[1]
MOST_LINES = 500  # of a module; near it, look for the seam
# Modules whose tests are elsewhere, and why.
ELSEWHERE = {
    "_torch_compat/tensor_chunks.py": (
        "distributed/test_sharded_checkpoints.py",
        "parts need several processes",
    ),
    "cli/commands.py": ("cli/test_main.py", "the table is tested with the command that reads it"),
    "engine/trainer/base.py": ("engine/trainer/test_trainer.py", "declares the attributes of the trainer, no more"),
    "engine/own_loop.py": ("examples/test_recipes_own_loop.py", "its recipe is compared with a plain loop"),
    "hooks/weight_average.py": ("engine/test_weight_average.py", "averages are tested in trainings of both APIs"),
    "optim/named.py": ("engine/test_several_optimizers.py", "named optimizers are tested in trainings of both APIs"),
    "optim/weight_average.py": ("engine/test_weight_average.py", "averages are tested in trainings of both APIs"),
    "parallel/simulated_pipeline.py": ("engine/test_estimation.py", "stages are compared with those of real processes"),
}
MODULES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py" and "defaults" not in path.parts  # config files are no modules
)


def has_functions(source: str) -> bool:
    """Whether there is something to test: a module may have declarations and names of other modules only."""
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(ast.parse(source)))


def name_of_tests(module: str) -> str:
    path = Path(module)
    return (path.parent / f"test_{path.name}").as_posix()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_tests_of_its_name(module: str) -> None:
    if not has_functions((PACKAGE / module).read_text(encoding="utf-8")):
        return
    expected, _ = ELSEWHERE.get(module, (name_of_tests(module), ""))
    file = TESTS / expected
    assert file.is_file(), f"trainwright/{module} has no tests: write tests/{expected}"
    assert "def test_" in file.read_text(encoding="utf-8"), f"tests/{expected} has no test"


def test_the_exceptions_are_needed() -> None:
    for module in ELSEWHERE:
        assert module in MODULES
        assert not (TESTS / name_of_tests(module)).exists()


def test_declarations_alone_need_no_tests() -> None:
    assert not has_functions("class Error(Exception):\n    code = 2\n\nfrom a import b\nNAMES = (b, Error)\n")
    assert has_functions("class A:\n    def method(self): ...\n")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_read_in_one_sitting(module: str) -> None:
    assert len((PACKAGE / module).read_text(encoding="utf-8").splitlines()) <= MOST_LINES

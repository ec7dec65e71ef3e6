"""Below the two trainer classes the settings of a run are read from its spec, not from a configuration of one API."""

import ast
from pathlib import Path

import trainwright

PACKAGE = Path(trainwright.__file__).parent
BELOW = ("engine", "evaluation", "hooks", "parallel", "optim", "data", "checkpoint", "graph", "trainer")
TYPES = {"TrainingConfig", "TrainerConfig", "DictConfig"}
HOLDERS = {"self", "me", "run", "trainer", "of_run", "_run", "_trainer"}
# What reads a configuration before there is a spec, or shows, saves or changes it for the user: this list only shrinks.
STILL = {
    "trainer/checks.py": 6,
    "trainer/model_card.py": 3,
    "trainer/parts.py": 6,
    "trainer/processes.py": 7,
    "trainer/start.py": 8,
    "trainer/run.py": 12,  # one reads what the user has changed in the passed one
    "trainer/trainer.py": 1,
}


def _names_a_type(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return annotation is not None and any(getattr(node, "id", "") in TYPES for node in ast.walk(annotation))


def _is_store(node: ast.expr, stores: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in stores
    is_held = isinstance(node, ast.Attribute) and node.attr in ("config", "cfg")
    return is_held and isinstance(node.value, ast.Name | ast.Attribute) and _last(node.value) in HOLDERS


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def reads(path: Path) -> int:
    """How often a file reads something of a ``TrainingConfig`` or a ``cfg``."""
    found = 0
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Lambda | ast.Module):
            continue
        stores = {"config", "cfg"} if path.parent.name in ("engine", "trainer") else set[str]()  # no others there
        if isinstance(scope, ast.FunctionDef):
            arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
            stores |= {one.arg for one in arguments if _names_a_type(one.annotation)}
            for node in ast.walk(scope):  # config = self.config
                if isinstance(node, ast.Assign):
                    targets, values = node.targets[0], node.value
                    pairs = zip(getattr(targets, "elts", [targets]), getattr(values, "elts", [values]), strict=False)
                    stores |= {_last(t) for t, v in pairs if isinstance(t, ast.Name) and _is_store(v, stores)}
        own = [node for node in ast.walk(scope) if isinstance(node, ast.Attribute | ast.Subscript)]
        nested = {
            id(n)
            for inner in ast.walk(scope)
            if inner is not scope and isinstance(inner, ast.FunctionDef)
            for n in ast.walk(inner)
        }
        found += sum(_is_store(node.value, stores) for node in own if id(node) not in nested)
    return found


def test_settings_are_read_from_the_spec() -> None:
    files = sorted(path for folder in BELOW for path in (PACKAGE / folder).rglob("*.py"))
    found = {path.relative_to(PACKAGE).as_posix(): reads(path) for path in files}
    assert {name: number for name, number in found.items() if number} == STILL


def test_a_read_is_found(tmp_path: Path) -> None:
    sources = {
        "def f(config: 'TrainingConfig'): return config.seed": 1,
        "def f(settings: DictConfig): return settings.train.seed": 1,
        "def f(self): return self._run.config.seed": 1,
        "def f(run):\n    settings = run.config\n    return settings.seed": 1,
        "def f(trainer): return trainer.cfg['seed']": 1,
        "def f(spec, model): return spec.seed, model.config.id2label": 0,
    }
    for source, number in sources.items():
        path = tmp_path / "part.py"
        path.write_text(source)
        assert reads(path) == number, source

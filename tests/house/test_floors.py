"""A file imports only from floors below its own, and no two files import each other in a circle."""

import ast
from pathlib import Path

import trainwright

PACKAGE = Path(trainwright.__file__).parent
FLOORS = [
    {"base"},
    {"_torch_compat"},
    {"config", "events"},
    {"parallel"},
    {"optim"},
    {"checkpoint"},
    {"data"},
    {"models"},
    {"evaluation"},
    {"hooks"},
    {"engine"},
    {"trainer", "config_trainer"},
    {"graph", "tasks", "inspect"},
    {"ops", "cli"},
]
# Imports of the core from a ring that are still to go: this list only shrinks.
STILL = [
    "",
    "",
][1:-1]
RINGS = {"graph", "tasks", "inspect", "ops", "cli"}
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "defaults" not in p.parts and p.parent != PACKAGE)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(path: Path, *, for_types: bool = False) -> set[str]:
    """Every module of ours that a file imports, also inside functions; what only a type checker reads if asked for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not for_types and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.startswith("trainwright"):
                is_package = (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
                names = {f"{node.module}.{a.name}" for a in node.names} if is_package else {node.module}
                # `from trainwright.base import dist` imports the module dist; any other name is the package's own.
                found |= {
                    n if (PACKAGE.parent / n.replace(".", "/")).with_suffix(".py").exists() else node.module
                    for n in names
                }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("trainwright")}
    return found


def test_every_room_has_a_floor() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert rooms <= set(FLOOR_OF)


def test_a_file_imports_only_from_floors_below() -> None:
    wrong = []
    for path in FILES:
        package = module_name(path).split(".")[1]
        for imported in sorted(own_imports(path) - {"trainwright"}):
            other = imported.split(".")[1]
            if other != package and FLOOR_OF[other] >= FLOOR_OF[package]:
                wrong.append(f"{module_name(path)} imports {imported}")
    assert wrong == STILL


def test_no_circle() -> None:
    graph = {module_name(p): own_imports(p, for_types=True) - {module_name(p)} for p in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for imported in graph.get(module, ()):
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())

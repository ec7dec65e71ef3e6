"""Whether a Python file is a program and no config file, from its text: nothing of it is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

_TRAINS = ("train", "fit", "fit_one_cycle")
_OF_CONFIGS = ("LazyCall", "LazyConfig", "get_config", "globals", "locals", "vars", "exec")
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def program_sign(file: Path) -> str | None:
    """The line that shows that the file is a program; None: it may be a config file.

    It is one if a statement of its top level trains with a ``...Trainer(...)``, which loading the file would do; or if
    it sets not both ``model`` and ``dataloader``, uses no lazy config, and trains anywhere or has a main block.
    """
    try:
        module = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # the command reports it
        return None
    run = [*_run_at_import(module)]
    trainers = {name for node in run for name in _trainers(node)}
    for call in run:
        if isinstance(call, ast.Call) and _trains(call) and _is_trainer(call.func.value, trainers):  # type: ignore[attr-defined]
            return _shown(call)
    if _may_be_config(module):
        return None
    main_block = next((line for line in module.body if _is_main_block(line)), None)
    signs = (
        call for call in _calls(module) if _trains(call) or _is_trainer(call, set()) or _attribute(call) == "backward"
    )
    sign = main_block or next(signs, None)
    return None if sign is None else _shown(sign)


def _may_be_config(module: ast.Module) -> bool:
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    imported = {
        (name.asname or name.name).partition(".")[0]
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    stored = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return bool({*_OF_CONFIGS} & (used | imported)) or "*" in imported or {"model", "dataloader"} <= stored | imported


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the file is loaded; not the bodies of functions, lambdas, classes and the main block."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _LATER) and not _is_main_block(child):
            yield child
            yield from _run_at_import(child)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    found = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    return iter(sorted(found, key=lambda call: call.lineno))


def _attribute(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _trains(call: ast.Call) -> bool:
    return _attribute(call) in _TRAINS


def _is_trainer(node: ast.expr, names: set[str]) -> bool:
    """Whether it is ``...Trainer(...)``, or one of ``names``, which are."""
    if isinstance(node, ast.Name):
        return node.id in names
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return str(name).endswith("Trainer")


def _trainers(node: ast.AST) -> Iterator[str]:
    """The names that an assignment, also one in an expression or of ``with``, gives to a ``...Trainer(...)``."""
    made = getattr(node, "context_expr" if isinstance(node, ast.withitem) else "value", None)
    if isinstance(made, ast.Call) and _is_trainer(made, set()):
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None), getattr(node, "optional_vars", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name))


def _is_main_block(line: ast.AST) -> bool:
    return isinstance(line, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(line.test)
    )


def _shown(node: ast.stmt | ast.Call) -> str:
    return f"line {node.lineno}: {ast.unparse(node).splitlines()[0][:60]}"

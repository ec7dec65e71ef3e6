"""Show a configuration as the Python that would set it."""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from trainwright.config.dotted import short_name

_LINE_LENGTH = 88


def to_py(cfg: DictConfig, prefix: str = "cfg.") -> str:
    """``cfg`` as lines like ``cfg.optim = torch.optim.AdamW(lr=0.1)``: sorted, interpolations resolved.

    For reading and diffs.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    lines: list[str] = []
    _write(plain, prefix.rstrip("."), lines)
    return "".join(line + "\n" for line in lines)


def _write(value: Any, name: str, lines: list[str]) -> None:
    if isinstance(value, dict) and value and "_target_" not in value and all(_is_name(key) for key in value):
        for key in sorted(value):
            _write(value[key], f"{name}.{key}" if name else key, lines)
        return
    lines.append(f"{name} = {_expression(value, len(name) + 3, 0)}")


def _expression(value: Any, used: int, indent: int) -> str:
    """``value`` on one line if it fits after ``used`` characters, else with one item per line."""
    if isinstance(value, dict) and "_target_" in value:
        arguments = {key: value[key] for key in value if key != "_target_"}
        if all(_is_name(key) for key in arguments):
            opening, closing = f"{short_name(value['_target_'])}(", ")"
            items = [(f"{key}=", arguments[key]) for key in sorted(arguments)]
        else:
            opening, closing = f"{short_name(value['_target_'])}(**{{", "})"
            items = [(f"{_literal(key)}: ", arguments[key]) for key in arguments]
    elif isinstance(value, dict):
        opening, closing = "{", "}"
        items = [(f"{_literal(key)}: ", value[key]) for key in sorted(value, key=str)]
    elif isinstance(value, list | tuple | ListConfig):
        opening, closing = "[", "]"
        items = [("", child) for child in value]
    else:
        return _literal(value)
    one_line = opening + ", ".join(name + _expression(child, 0, -1) for name, child in items) + closing
    if indent < 0 or not items or used + len(one_line) <= _LINE_LENGTH:
        return one_line
    inner = " " * (indent + 4)
    parts = [f"{inner}{name}{_expression(child, indent + 4 + len(name) + 1, indent + 4)}," for name, child in items]
    return "\n".join([opening, *parts, " " * indent + closing])


def _literal(value: Any) -> str:
    if isinstance(value, str):
        text = repr(value)
        return text if text.startswith('"') or '"' in text else f'"{text[1:-1]}"'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return short_name(value) if callable(value) else repr(value)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier()

"""HTML for notebooks, without a kernel; ``tests/events/writers/test_notebook.py`` starts one."""

import os
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.base.notebook import CellOutput, curves, is_kernel, runs_cells, show_type_as_html, summary, table, tree

ATTACK = "<script>alert('1')</script>&\"'"


def parsed(html: str) -> ET.Element:
    """Raises if a tag is not closed or a character is not escaped."""
    return ET.fromstring(f"<page>{html}</page>")


def texts(html: str) -> list[str]:
    return [text for text in parsed(html).itertext() if text.strip()]


class Shell:
    """What IPython has in a kernel."""

    def __init__(self, pid: int | None = None) -> None:
        self.kernel = SimpleNamespace(session=SimpleNamespace(pid=pid or os.getpid()))
        self.display_pub = object()


def put_in(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def test_only_a_process_with_a_kernel_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class CapturingDisplayPublisher:
        """Of ``%%capture``."""

    captures, terminal = Shell(), SimpleNamespace(display_pub=None)
    captures.display_pub = CapturingDisplayPublisher()
    for shell in (None, terminal, captures, Shell(pid=1)):
        put_in(monkeypatch, shell)
        assert not is_kernel()
        assert runs_cells() == (shell is captures)
    put_in(monkeypatch, Shell())
    assert is_kernel()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_kernel()


def test_a_class_of_another_package_is_registered_in_ipython_only(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    formatter = SimpleNamespace(for_type_by_name=lambda *arguments: registered.append(arguments))
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    show_type_as_html("a.b", "C", str)
    assert registered == []
    put_in(monkeypatch, shell)
    show_type_as_html("a.b", "C", str)
    assert registered == [("a.b", "C", str)]


def test_an_output_is_shown_once_and_then_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any, Any]] = []
    display = SimpleNamespace(
        display=lambda data, raw, display_id: calls.append(("display", data, display_id)),
        update_display=lambda data, raw, display_id: calls.append(("update", data, display_id)),
    )
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    first, second = CellOutput(), CellOutput()
    for output in (first, second):
        output.show("<b>1</b>", "1")
        output.show("<b>2</b>", "2")
    assert [kind for kind, *_ in calls] == ["display", "update"] * 2
    assert calls[1][1] == {"text/html": "<b>2</b>", "text/plain": "2"}
    assert calls[0][2] == calls[1][2] != calls[2][2]


def test_everything_is_escaped() -> None:
    config = {ATTACK: {"_target_": ATTACK, "a": [{"b": ATTACK}]}}
    picture = curves({ATTACK: [(1.0, 2.0), (2.0, 1.0)]})
    for html in (table([[ATTACK]], [ATTACK]), summary(ATTACK, {ATTACK: ATTACK}), tree(config), picture):
        assert "<script" not in html
        assert any(ATTACK in text for text in texts(html))


def points_of(html: str) -> list[list[tuple[float, float]]]:
    lines = [line.get("points", "") for line in parsed(html).iter("polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in lines]  # type: ignore[misc]


def test_curves_share_their_axes_and_stay_inside() -> None:
    html = curves({"training loss": [(1.0, 2.0), (50.0, 1.5), (100.0, 1.0)], "evaluation loss": [(100.0, 1.2)]})
    (training, evaluation) = points_of(html)
    assert [y for _, y in training] == sorted(y for _, y in training)  # downwards
    assert training[-1][0] == evaluation[0][0]
    assert training[-1][1] > evaluation[0][1]
    picture = next(parsed(html).iter("svg"))
    for x, y in training + evaluation:
        assert 0 <= x <= float(picture.get("width", 0))
        assert 0 <= y <= float(picture.get("height", 0))
    assert {"2", "1", "100 iterations", "training loss", "evaluation loss"} <= {*texts(html)}


@pytest.mark.parametrize("lines", [{}, {"a": []}, {"a": [(1.0, 1.0)]}, {"a": [(0.0, 1.0), (0.0, 2.0)]}], ids=str)
def test_too_few_points_make_no_picture(lines: dict[str, list[tuple[float, float]]]) -> None:
    assert curves(lines) == ""

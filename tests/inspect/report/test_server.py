"""A report is served on this machine only, and follows a run."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainwright.base.errors import ConfigError
from trainwright.inspect.report import server as module
from trainwright.inspect.report.run_data import find_runs
from trainwright.inspect.report.server import ReportServer


@pytest.fixture
def served(runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportServer]:
    monkeypatch.setattr(module, "_MIN_AGE", 0.0)
    shutil.copytree(runs_folder / "files", tmp_path / "run", symlinks=True)
    with ReportServer(lambda: find_runs([str(tmp_path / "run")])) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, bytes, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read(), answer.headers.get("ETag", "")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b"", ""


def test_new_rows_are_served(served: ReportServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, tag = get(served.url + "content.json")
    assert code == 200
    assert len(json.loads(text)["charts"][0]["lines"][0]["x"]) == 24
    served._next = 0.0
    assert get(served.url + "content.json", **{"If-None-Match": tag})[0] == 304
    with (tmp_path / "run" / "losses.csv").open("a") as file:
        file.write("24,0.5\n")
    served._next = 0.0
    code, text, _ = get(served.url + "content.json", **{"If-None-Match": tag})
    assert code == 200
    assert json.loads(text)["charts"][0]["lines"][0]["y"][-1] == 0.5


def test_only_this_machine_is_answered(served: ReportServer) -> None:
    assert served.server_address[0] == "127.0.0.1"
    assert get(served.url, Host="attacker.example")[0] == 403
    assert get(served.url + "../../etc/passwd")[0] == 404


@pytest.mark.exhaustive
def test_a_browser_follows_the_run(served: ReportServer, browse: Callable[..., str]) -> None:
    drawn = browse(served.url, "--virtual-time-budget=5000")
    assert ">live<" in drawn
    assert "js-plotly-plot" in drawn


def test_a_port_in_use_is_an_error(served: ReportServer) -> None:
    with pytest.raises(ConfigError, match=f"--port: {served.server_port} cannot be used"):
        ReportServer(list, served.server_port)

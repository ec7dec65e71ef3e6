"""What a notebook shows during a training: in a kernel that runs the tutorial, and as HTML without one."""

import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from trainwright.base.notebook import CellOutput
from trainwright.events import EventStorage, ProgressAwareHandler, ProgressWriter
from trainwright.events.writers import default_writers, progress
from trainwright.events.writers.notebook import Content, MeanCurve, NotebookDisplay
from trainwright.events.writers.progress import bar_stream, live_bars

TUTORIAL = Path(__file__).parents[3] / "examples" / "notebooks" / "first_training.ipynb"
MAX_BYTES = 50_000

INTERRUPTED = """
import os, signal
from trainwright.hooks import CallbackHook

class Interrupt(CallbackHook):
    def after_step(self):
        if self.trainer.iter == 150:
            print("interrupting")
            os.kill(os.getpid(), signal.SIGINT)

stopped = Trainer(model, config.copy_with(output_dir="output/stopped"), train_data, eval_data)
stopped.register_hooks([Interrupt()])
stopped.train()
print("after train")
"""

TWO_IN_A_CELL = """
import warnings
from trainwright import DefaultTrainer, LazyCall
from trainwright.data import build_image_train_loader

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(64, width)
    def forward(self, images, labels):
        return {"total_loss": nn.functional.cross_entropy(self.layer(images), labels)}

def collate(samples):
    return {"images": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

def train(name, **settings):
    cfg = LazyCall(dict)()
    cfg.model = LazyCall(Net)(width=10)
    cfg.optim = LazyCall(torch.optim.SGD)(lr=0.1)
    cfg.dataloader = LazyCall(dict)(train=torch.utils.data.DataLoader(train_data, batch_size=50, collate_fn=collate))
    cfg.train = dict(output_dir=f"output/{name}", train_micro_batch_size=50, train_epoch=2, **settings)
    DefaultTrainer(cfg).train()
    return cfg

print("first")
train("files")
print("second", file=__import__("sys").stdout)
cfg = train("again")
warnings.warn("third")
"""

CELLS = {
    "interrupted": INTERRUPTED,
    "two": TWO_IN_A_CELL,
    "evaluations": """
settings = dict(output_dir="output/steps", num_epochs=1, eval_strategy="step", eval_steps=20)
Trainer(model, config.copy_with(**settings), train_data, eval_data).train()
""",
    "again": "cfg = train('files')",
    "off": "cfg = train('off', progress_bar=False)",
    "failed": "Net.forward = lambda self, images, labels: 1 / 0\ntrain('failed')",
    "own loop": """
from trainwright.events import EventStorage, ProgressWriter
with EventStorage() as storage:
    ProgressWriter(10).begin(storage)
    raise LookupError
""",
    "lazy": "LazyCall(Net)(width='<script>')",
    "foreign": "from omegaconf import OmegaConf\nOmegaConf.create({'a': 1})",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tutorial, and then the cells above, as executed by a kernel: the only one that the tests start."""
    content = nbformat.read(TUTORIAL, as_version=4)
    content.cells += [nbformat.v4.new_code_cell(text, metadata={"name": name}) for name, text in CELLS.items()]
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(
        content, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, allow_errors=True
    )
    return client.execute()


def outputs_of(notebook: Any, name: str) -> list[Any]:
    """The outputs of one of the cells above, or of the first cell with this text."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and (cell.metadata.get("name") == name if name in CELLS else name in cell.source):
            return list(cell.outputs)
    raise AssertionError(name)


def displays(outputs: list[Any]) -> list[str]:
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def rows_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


@pytest.mark.subprocess
@pytest.mark.exhaustive
class TestKernel:
    def test_the_tutorial_runs_without_an_error(self, notebook: Any) -> None:
        tutorial = [cell for cell in notebook.cells if cell.cell_type == "code" and "name" not in cell.metadata]
        outputs = [output for cell in tutorial for output in cell.outputs]
        assert [output for output in outputs if output.output_type == "error"] == []
        assert [output.text for output in outputs if output.get("name") == "stderr"] == []  # no warning of tqdm
        assert "predicted [" in printed(outputs_of(notebook, "trainer.predict"))

    def test_a_training_is_one_output_that_holds_its_end(self, notebook: Any) -> None:
        (html,) = displays(outputs_of(notebook, "results = trainer.train()"))
        assert ">finished</b>" in html
        assert "Epoch 8/8" in html
        assert "width:100.0%" in html
        assert len(html) < MAX_BYTES
        assert "<script" not in html
        head, *rows = rows_of(html)
        assert head == ["epoch", "total_loss", "accuracy", "eval_loss", "eval_accuracy", "lr", "time"]
        assert [row[0] for row in rows] == [str(epoch) for epoch in range(1, 9)]
        assert all(float(cell.strip("★ s")) >= 0 for row in rows for cell in row)
        losses = [float(row[3].strip("★ ")) for row in rows]
        assert [row[3].startswith("★") for row in rows] == [one == min(losses[: n + 1]) for n, one in enumerate(losses)]
        assert html.count("<polyline") == 2

    def test_what_is_in_the_table_is_not_printed(self, notebook: Any) -> None:
        text = printed(outputs_of(notebook, "results = trainer.train()"))
        assert "Training\n" in text
        assert "Finished after iteration" in text
        assert "Epoch 1/8" not in text
        assert "samples/s" not in text

    @pytest.mark.parametrize(
        ("cell", "state", "epoch", "error"),
        [
            ("interrupted", "interrupted", "Epoch 4/8", None),
            ("failed", "failed: ZeroDivisionError", "", "ZeroDivisionError"),
            ("own loop", "failed: LookupError", "", "LookupError"),
            ("again", "finished", "Epoch 2/2", None),
        ],
    )
    def test_a_bar_shows_how_its_training_ended(
        self, cell: str, state: str, epoch: str, error: str | None, notebook: Any
    ) -> None:
        outputs = outputs_of(notebook, cell)
        (html,) = displays(outputs)
        assert f">{state}</b>" in html
        assert epoch in html
        assert outputs[-1].get("ename") == error
        assert ("saved after iteration" in printed(outputs)) == (cell == "interrupted")

    def test_an_interrupted_training_returns_so_that_the_next_cell_runs(self, notebook: Any) -> None:
        text = printed(outputs_of(notebook, "interrupted"))
        assert "so that the next cell runs." in text
        assert text.endswith("after train\n")

    def test_two_trainings_of_a_cell_have_a_display_each_in_the_order_of_the_text(self, notebook: Any) -> None:
        outputs = outputs_of(notebook, "two")
        assert len(displays(outputs)) == 2
        kinds = ["bar" if "text/html" in output.get("data", {}) else output.get("text", "") for output in outputs]
        text = "|".join(kinds)
        second = text.index("second")
        assert text.index("first") < text.index("|bar") < second < text.index("|bar", second) < text.index("third")

    def test_the_table_of_one_epoch_has_its_evaluations(self, notebook: Any) -> None:
        (html,) = displays(outputs_of(notebook, "evaluations"))
        head, *rows = rows_of(html)
        assert {"iteration", "eval_loss", "eval_accuracy"} <= {*head}
        assert [row[0] for row in rows] == ["20", "40", "46"]

    def test_the_setting_turns_the_display_off_in_config_files(self, notebook: Any) -> None:
        outputs = outputs_of(notebook, "off")
        assert displays(outputs) == []
        assert "samples/s" in printed(outputs)  # as in a pipe

    def test_objects_are_shown_as_html_and_keep_their_text(self, notebook: Any) -> None:
        for name, words in {
            'Run("output/digits")': ("finished", "Best eval_loss", "<svg"),
            "lazy": (".Net(", "&lt;script&gt;"),
        }.items():
            (output,) = outputs_of(notebook, name)
            html = output.data["text/html"]
            assert all(word in html for word in words), html
            assert len(html) < MAX_BYTES
            assert output.data["text/plain"]
        trainer = next(c for c in notebook.cells if c.source == "trainer").outputs[0].data["text/html"]
        assert all(word in trainer for word in ("4,810 parameters", "368 of 368 done", "eval_loss", "<svg"))
        assert displays(outputs_of(notebook, "early_stopping=None"))[0].count("<tr>") == 5
        assert displays(outputs_of(notebook, "foreign")) == []  # configs of other programs


# Without a kernel.


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The outputs of this process, as if it were a kernel."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(CellOutput, "show", lambda self, html, text: found.append((html, text)))
    monkeypatch.setattr(progress, "is_kernel", lambda: True)
    yield found
    for bar in [*live_bars]:
        bar.close()


CONTENT = Content("Epoch 2/3", 5, 10, ["1.5 it/s"], ["loss 0.5"], "", "", "")
ATTACK = "<script>alert(1)</script>"


def test_everything_is_escaped(shown: list[tuple[str, str]]) -> None:
    display = NotebookDisplay(None)
    display.add_row({ATTACK: ATTACK})
    display.show(Content(ATTACK, 1, 2, [ATTACK], [ATTACK], ATTACK, ATTACK, ATTACK))
    html, text = shown[-1]
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 8
    assert text.count(ATTACK) == 4


def test_a_long_table_keeps_its_end_and_stays_small(shown: list[tuple[str, str]]) -> None:
    storage = EventStorage()
    display = NotebookDisplay(storage)
    for epoch in range(1, 1001):
        storage.iter = 10 * epoch
        storage.put_scalar("total_loss", 1 / epoch)
        storage.put_scalar("eval_loss", 2 / epoch)
        display.add_row({"epoch": str(epoch)} | {f"metric_{number}": "0.123456" for number in range(30)})
    storage.latest()
    display.show(CONTENT)
    html = shown[-1][0]
    _, earlier, *rows = rows_of(html)
    assert earlier == ["… 950 earlier"]
    assert [rows[0][0], rows[-1][0]] == ["951", "1000"]
    assert len(html) < MAX_BYTES


def test_a_long_curve_is_the_mean_of_ranges() -> None:
    curve, total = MeanCurve(), 100_000
    for start in range(0, total, 1000):
        curve.extend((float(place), place) for place in range(start, start + 1000))
    curve.extend([(math.nan, total), (math.inf, total)])
    points = curve.points(done=total)
    assert 100 < len(points) <= 200
    assert curve.next == total + 1
    assert all(x == pytest.approx(y + 1, abs=0.6) for x, y in points[:-1])
    assert points[-1][0] <= total


def test_the_writer_ends_its_display(shown: list[tuple[str, str]]) -> None:
    ends = ((None, "stopped"), (KeyboardInterrupt(), "interrupted"), (OSError("full"), "failed: OSError"))
    for error, expected in ends:
        storage = EventStorage()
        writer = ProgressWriter(10)
        writer.begin(storage)
        try:
            if error is not None:
                raise error
            writer.close()
        except BaseException:
            writer.close()
        assert shown[-1][1].endswith(expected)
        assert f">{expected}</b>" in shown[-1][0]
        assert not live_bars
    try:
        raise OSError
    except OSError:  # a training within a handler, such as a second attempt
        storage = EventStorage()
        writer = ProgressWriter(1)
        writer.begin(storage)
        storage.iter, storage.is_over = 1, True
        writer.close()
    assert shown[-1][1].endswith("finished")


def test_a_display_that_fails_ends_no_training(
    shown: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: CellOutput, html: str, text: str) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(CellOutput, "show", fail)
    writer = ProgressWriter(10)
    writer.begin(EventStorage())
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "The progress display failed (OSError: no connection). The training continues."
    ]


def test_lines_of_progress_are_left_out_and_others_are_printed(
    shown: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.Logger("of_test")
    log.addHandler(ProgressAwareHandler(sys.stdout))
    writer = ProgressWriter(10)
    writer.begin(EventStorage())
    assert live_bars[0].add_row({"epoch": "1"})
    log.info("in the table", extra={"progress": True})
    log.warning("printed")
    writer.close()
    log.info("afterwards", extra={"progress": True})
    assert capsys.readouterr().out == "printed\nafterwards\n"


def test_the_setting_turns_the_display_off(shown: list[tuple[str, str]], tmp_path: Path) -> None:
    assert bar_stream() is sys.stdout
    for is_on in (True, False):
        writers = default_writers(tmp_path, 10, batch_size=4, progress_bar=is_on, tensorboard=None)
        assert any(isinstance(writer, ProgressWriter) for writer in writers) is is_on
    assert shown == []

"""Libraries that lose work, each in one way, to see that the judge finds it: a test that cannot fail shows nothing.

Each is done to the library in the process that trains, before the training begins.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.torture import judge
from tests.torture.starts import Spoiler


def names_before_it_is_whole() -> None:
    """A checkpoint gets its name, and then its manifest."""
    from trainwright.base.files import sync_folder
    from trainwright.checkpoint import saving

    def commit(temporary: Path, final: Path, synced: Collection[str]) -> None:
        manifest = (temporary / "manifest.json").read_bytes()
        (temporary / "manifest.json").unlink()
        os.rename(temporary, final)
        for _ in range(10):  # slowly, so that one of a few kills hits it
            sync_folder(final.parent)
        (final / "manifest.json").write_bytes(manifest)

    saving.commit_folder = commit  # type: ignore[assignment]


def points_before_it_is_there() -> None:
    """``last_checkpoint`` names what is about to be written."""
    from trainwright.checkpoint import saving

    write = saving.write_checkpoint

    def write_late(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name != "model_best":
            saving.write_pointer(path.parent, path.name)
        return write(path, *args, **kwargs)

    saving.write_checkpoint = write_late


def forgets_random_numbers() -> None:
    """A resumed run draws other numbers."""
    from trainwright.engine import state as progress

    progress.set_random_state = lambda state: None


def keeps_all_rows() -> None:
    """A resumed run adds its rows to whatever is in metrics.json."""
    from trainwright.events.writers import JSONWriter

    JSONWriter._prepare = lambda self, first, *, is_new_run: -1  # type: ignore[method-assign]


def keeps_what_is_half() -> None:
    """What a killed run had begun to write stays."""
    from trainwright.checkpoint import saving
    from trainwright.events.writers import rows

    saving.remove_stale = rows.remove_stale = lambda folder: []


SPOILERS: dict[str, tuple[Spoiler, str]] = {
    spoiler.__name__: (spoiler, kind)
    for spoiler, kind in (
        (names_before_it_is_whole, judge.LOST),
        (points_before_it_is_there, judge.LOST),
        (forgets_random_numbers, judge.DIFFERING),
        (keeps_all_rows, judge.DIFFERING),
        (keeps_what_is_half, judge.STALE),
    )
}

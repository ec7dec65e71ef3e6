"""The mirror of a run's checkpoints: a resume on another machine begins with the files of the run that are there."""

from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.checkpoint.folder import POINTER_NAME
from trainwright.engine.folder.files import LIST_NAME, RunFiles
from trainwright.parallel.simulated import simulation

if TYPE_CHECKING:
    from trainwright.checkpoint.mirror import Mirror


def mirror_of(url: str | None, setting: str, files: RunFiles) -> "Mirror | None":
    """The mirror of a run's checkpoints; None without a URL.

    Raises:
        ConfigError: the URL is wrong, or a package is not installed.
    """
    if not url:
        return None
    from trainwright.checkpoint.mirror import Mirror

    save_dir = files.folder / files.file_names.checkpoints
    return Mirror(
        url,
        save_dir,
        files.folder,
        run_files=lambda: _continued(files),
        is_own=lambda name: name == LIST_NAME or files.is_own(name),
        setting=setting,
    )


def fetch_run(mirror: "Mirror | None", *, resumes: bool, trains: bool = True) -> None:
    """Check that a mirror can be used; for a run that resumes, download what its folder lacks.

    Every process must call this. ``trains``: False for an evaluation, which writes nothing there.

    Raises:
        ConfigError: the mirror cannot be written or read.
    """
    if mirror is not None and simulation() is None:
        if trains:
            mirror.check()
        if resumes:
            mirror.fetch()


def _continued(files: RunFiles) -> list[str]:
    """The files, without checkpoints, of which a resumed run writes the rest."""
    names = [name for name in files.entries() if Path(name).name != POINTER_NAME and not name.startswith("profile/")]
    return [LIST_NAME, *(name for name in names if _is_file(files.folder / name))]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()

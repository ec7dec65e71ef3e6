"""The files that rows name: relative to where they may lie, found without asking the disk for each of them."""

import os
from pathlib import Path


class FileFinder:
    """Looks for a file beside the table, in the data's folder, and in ``subfolder`` of both.

    Each folder is listed once: 100,000 rows of one folder are a single look at the disk.
    """

    def __init__(self, table_folder: Path, root: Path, subfolder: str) -> None:
        roots = list(dict.fromkeys([table_folder, root]))
        self._places = [place for base in roots for place in (base, base / subfolder)]
        self._listed: dict[str, set[str]] = {}

    @property
    def places(self) -> str:
        """Where is looked, for messages."""
        return ", ".join(str(place) for place in self._places)

    def find(self, name: str) -> Path | None:
        """The absolute path of a file; None if it is nowhere, or no file. Windows' separators are taken, too."""
        if not name:
            return None
        spellings = [name, name.replace("\\", "/")] if "\\" in name else [name]
        for place in self._places:
            for spelling in spellings:
                path = place / os.path.expanduser(spelling)
                if path.name in self._files(path.parent):
                    return Path(os.path.abspath(path))
        return None

    def _files(self, folder: Path) -> set[str]:
        key = os.fspath(folder)
        if key not in self._listed:
            try:
                with os.scandir(folder) as entries:
                    self._listed[key] = {entry.name for entry in entries if entry.is_file()}
            except OSError:
                self._listed[key] = set()
        return self._listed[key]

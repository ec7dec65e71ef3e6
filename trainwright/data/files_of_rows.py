"""The files that rows name: relative to where they may lie, found without asking the disk for each of them."""

import os
from pathlib import Path


class FileFinder:
    """Looks for a file beside the table, in the data's folder, and in ``subfolder`` of both.

    Each folder is listed once: 100,000 rows of one folder are a single look at the disk.
    """

    def __init__(self, table_folder: Path, root: Path, subfolder: str, *, is_foreign: bool = False) -> None:
        """``is_foreign``: the table came from somebody else, and may name no file outside of ``root``."""
        self._root = os.path.join(os.path.abspath(root), "") if is_foreign else None
        roots = dict.fromkeys(os.path.abspath(folder) for folder in (table_folder, root))
        self._places = [place for base in roots for place in (base, os.path.join(base, subfolder))]
        self._listed: dict[str, tuple[str, frozenset[str]]] = {}

    @property
    def places(self) -> str:
        """Where is looked, for messages."""
        return ", ".join(self._places)

    def find(self, name: str) -> str | None:
        """The absolute path of a file; None if it is nowhere, or no file. Windows' separators are taken, too."""
        if not name:
            return None
        for spelling in [name, name.replace("\\", "/")] if "\\" in name else [name]:
            for place in self._places:
                folder, file = os.path.split(os.path.join(place, os.path.expanduser(spelling)))
                absolute, files = self._listing(folder)
                is_allowed = self._root is None or os.path.join(absolute, "").startswith(self._root)
                if file in files and is_allowed:
                    return os.path.join(absolute, file)
        return None

    def _listing(self, folder: str) -> tuple[str, frozenset[str]]:
        if folder not in self._listed:
            try:
                with os.scandir(folder) as entries:
                    files = frozenset(entry.name for entry in entries if entry.is_file())
            except OSError:
                files = frozenset()
            self._listed[folder] = (os.path.abspath(folder), files)
        return self._listed[folder]

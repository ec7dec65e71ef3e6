"""A mirror: copies of a run's checkpoints at a URL, from which a run resumes on another machine.

A background thread copies each committed checkpoint with the files of the run that a resume continues. Every process
uploads what it has written. What the index of the mirror lists is complete (see :mod:`.mirror_index`). A failure is a
warning: it neither ends the training nor changes a local checkpoint.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainwright.base import dist
from trainwright.base.dist import raised_together
from trainwright.base.errors import ConfigError
from trainwright.base.files import (
    PathLike,
    atomic_write,
    commit_folder,
    hard_link,
    make_folders,
    point_at,
    real_path,
    relative_path,
    remove_folder,
    remove_stale,
    temporary_sibling,
)
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import (
    Saved,
    checkpoint_folders,
    is_checkpoint,
    links_in,
    order_of,
    read_pointer,
    resume_candidates,
    write_pointer,
)
from trainwright.checkpoint.manifest import FOR_PEOPLE, MANIFEST_NAME, FileEntry, Manifest, read_manifest
from trainwright.checkpoint.mirror_index import (
    Copied,
    Index,
    entry_of,
    image_of,
    is_place,
    kept_in,
    place_of,
    read_index,
)
from trainwright.checkpoint.mirror_store import PROBE, MissingObjectError, Store, StoreError
from trainwright.checkpoint.saving import Background, Committed, remove_unlinked
from trainwright.checkpoint.sharded_saving import Exchange, Place
from trainwright.checkpoint.verify import file_faults
from trainwright.events.formats import RECORD_NAME, read_starts

logger = logging.getLogger("trainwright.checkpoint")

Prune = Callable[[Path], object]  # deletes older checkpoints of a folder
_MAX_RUN_FILE = 64 << 20  # bytes of a file of the run; a larger one is left out
_COPIED = "="  # before the place of a checkpoint that the mirror has already


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A checkpoint to copy."""

    name: str
    committed: Committed
    tag_last: bool
    prune: Prune | None
    ranks: Exchange


class Mirror:
    """The copies of the checkpoints in ``save_dir`` at ``url``, for any file system of fsspec.

    Args:
        folder: of the run, in which the checkpoints' folder may be; by default ``save_dir``.
        run_files: returns the files of the run that a resume continues, by their paths in ``folder``.
        is_own: whether a path in ``folder`` is free, or a file of the run.
        setting: the name of the URL in messages.

    Raises:
        ConfigError: fsspec, or the package for this kind of store, is not installed, or the URL is wrong.
    """

    def __init__(
        self,
        url: str,
        save_dir: PathLike,
        folder: PathLike | None = None,
        *,
        run_files: Callable[[], Iterable[str]] = tuple,
        is_own: Callable[[str], bool] = lambda name: True,
        setting: str = "mirror",
    ) -> None:
        self.store = Store(url, setting)
        self.store.check_outside(*(path for path in (folder, save_dir) if path is not None))
        self._save_dir = Path(os.path.abspath(save_dir))
        self._folder = Path(os.path.abspath(save_dir if folder is None else folder))
        inner = relative_path(self._save_dir, self._folder)
        self._inner = "checkpoints" if inner.startswith("..") or os.path.isabs(inner) else inner
        self._run_files, self._is_own = run_files, is_own
        self._background = Background()
        self._waiting: list[Save] = []
        self._failure: tuple[Save, Exception] | None = None  # of the newest checkpoint
        self._newest: Save | None = None
        self._has_warned = self._is_cleaned = False
        self._warned_of_files = set[str]()
        self._index, self._number = Index(), 0  # as this process has written or read it
        self._manifests: dict[str, bytes] = {}  # by the keys of the checkpoints
        self._begun = b""  # the manifest of the checkpoint that is being copied
        self._uploaded: dict[tuple[int, str], str] = {}  # the object of a content
        self._unused: list[str] = []  # folders to delete

    def __repr__(self) -> str:
        return f"Mirror({self.store.shown!r}, {str(self._save_dir)!r})"

    # Before the training.

    def check(self) -> None:
        """Write, read and delete a small object, on each rank that will write. Every rank must call this.

        Raises:
            ConfigError: the store refuses it, or cannot be reached.
        """
        with raised_together():
            if dist.is_main_process() or getattr(dist.mesh_in_use(), "device_mesh", None) is not None:
                self.store.check()

    def has_checkpoint(self) -> bool:
        """Whether there is a complete checkpoint."""
        index, _ = read_index(self.store)
        return index is not None and bool(index.checkpoints)

    def check_empty(self) -> None:
        """Check that a new run, which has saved nothing, does not write into the mirror of another one.

        Every rank must call this.

        Raises:
            ConfigError: the mirror has checkpoints.
        """
        with raised_together():
            if dist.is_main_process() and not self._number and self.has_checkpoint():
                raise ConfigError(
                    f"{self.store.setting}: {self.store.shown} has the checkpoints of another run, and this is a new"
                    " one. Resume that run, or set a URL of its own for each run."
                )

    # Download.

    def fetch(self) -> str:
        """Download the newest checkpoint, the best ones and the run's files, if ``save_dir`` has no newer checkpoint.

        Every rank must call this; one of each file system downloads. Returns the name of the downloaded checkpoint, or
        "".

        Raises:
            CheckpointError: the mirror has checkpoints, and none of them is complete.
            ConfigError: the mirror is of another run than the folder.
            StoreError: the mirror cannot be read now.
        """
        downloads = Place.of(self._save_dir).is_first
        with raised_together():
            name = self._fetch() if downloads else ""
        return dist.broadcast_object(name)

    def complete(self, folder: Path) -> None:
        """Download the parts of other hosts of a local checkpoint. Every rank must call this.

        Nothing is done if the ranks share the folder, or if the mirror does not have this checkpoint.
        """
        place = Place.of(self._save_dir)
        if place.is_shared:
            return
        self._background.wait()
        with raised_together():
            pass  # every rank has uploaded its parts
        with raised_together():
            if place.is_first and real_path(folder.parent) == real_path(self._save_dir):
                self._complete_parts(folder)

    def _complete_parts(self, folder: Path) -> None:
        index, key = read_index(self.store)[0], _key_of(folder)
        one = None if index is None or key is None else index.find(key)
        if one is None:
            return
        manifest = read_manifest(folder)
        for name, entry in manifest.files.items():
            alone = replace(manifest, files={name: entry})
            if not file_faults(folder, alone, contents=False)[0]:
                continue
            temporary = temporary_sibling(folder / name)
            try:
                self.store.download(f"{one.place}/{name}", temporary)
                os.replace(temporary, folder / name)
            finally:
                temporary.unlink(missing_ok=True)

    def _fetch(self) -> str:
        index, _ = read_index(self.store)
        if index is None or not index.checkpoints:
            return ""
        self._check_run(index)
        self._read_manifests(index)
        make_folders(self._save_dir)
        remove_stale(self._save_dir)
        with image_of(index, self._manifests, self._save_dir) as image:
            inner = image / index.folder
            order, local = order_of(inner), order_of(self._save_dir)
            newest = max((one.sequence for one in order.resumable), default=-1)
            own = max((one.sequence for one in local.resumable if _has_all_files(one)), default=-1)
            if own >= newest or any(entry.error is not None for entry in local.unreadable):
                return ""
            found = {one.name: one for one in index.checkpoints}
            candidates = [(path.name, _name_in(image, path)) for path in resume_candidates(inner)]
            others = [found[name] for one in order.others if (name := _name_in(image, one.path)) in found]
            return self._download_all(
                index, [(name, found[path]) for name, path in candidates if path in found], others
            )

    def _check_run(self, index: Index) -> None:
        run = self._run()
        if None not in (run, index.run) and run != index.run:
            raise ConfigError(
                f"{self.store.setting}: {self.store.shown} has the checkpoints of another run than {self._folder}: that"
                f" was first started at {index.run}, this one at {run}. Set another folder, or another URL."
            )

    def _run(self) -> str | None:
        """When the run was first started; None: unknown."""
        starts = read_starts(self._folder / RECORD_NAME)
        return starts[0].get("started") if starts else None

    def _download_all(self, index: Index, candidates: list[tuple[str, Copied]], others: list[Copied]) -> str:
        faults, made = list[str](), dict[tuple[int, str], Path]()
        for name, chosen in candidates:
            self._check_own(chosen.run_files)
            logger.info("%s: downloading %s from %s.", self.store.setting, name, self.store.shown)
            try:
                with self._downloaded(chosen, made) as (temporary, target):
                    run_files = {file: self._checked(chosen, file) for file in chosen.run_files}
                    if faults:
                        logger.warning("%s", "\n".join([*faults, f"Resuming from {name} instead."]))
                    for other in others:  # a best one, which the end of the training may load
                        self._download_other(other, made)
                    for file, content in run_files.items():
                        make_folders((self._folder / file).parent)
                        atomic_write(self._folder / file, content)
                    _put(temporary, target)
            except (CheckpointError, MissingObjectError) as error:
                faults.append(f"{self.store.shown}/{chosen.place}: {error}")
                continue
            for link, checkpoint in (index.links or {}).items():
                place = self._local(link)
                if is_checkpoint(self._local(checkpoint)) and (place.is_symlink() or not place.exists()):
                    point_at(place, self._local(checkpoint))
            write_pointer(self._save_dir, name)
            return name
        raise CheckpointError("\n".join([f"{self.store.shown}: none of the checkpoints is valid.", *faults]))

    def _check_own(self, names: Iterable[str]) -> None:
        foreign = [name for name in names if not self._is_own(name)]
        if foreign:
            raise ConfigError(
                f"{self.store.setting}: {self._folder} has files that no run wrote, under names of the run in"
                f" {self.store.shown}: {', '.join(foreign)}. Move or rename them, or set another output folder."
            )

    def _download_other(self, one: Copied, made: dict[tuple[int, str], Path]) -> None:
        try:
            with self._downloaded(one, made) as (temporary, target):
                _put(temporary, target)
        except (CheckpointError, OSError) as error:
            logger.warning("%s: %s could not be downloaded (%s).", self.store.shown, one.place, error)

    @contextmanager
    def _downloaded(self, one: Copied, made: dict[tuple[int, str], Path]) -> Iterator[tuple[Path, Path]]:
        """A verified temporary folder of a checkpoint, and the path that it gets. ``made``: files that are here."""
        target = self._local(one.name)
        make_folders(target.parent)
        temporary = temporary_sibling(target)
        try:
            temporary.mkdir()
            (temporary / MANIFEST_NAME).write_bytes(self._manifests[one.key])
            manifest, has_parts = read_manifest(temporary), _key_of(target) == one.key
            for name, entry in manifest.files.items():
                known = made.get((entry.bytes, entry.xxh3_128))
                if known is None and has_parts and not file_faults(target, replace(manifest, files={name: entry}))[0]:
                    known = target / name
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                if known is None or not hard_link(known, temporary / name):
                    self.store.download(f"{one.place}/{name}", temporary / name)
            faults, _ = file_faults(temporary, manifest)
            if faults:
                raise CheckpointError("; ".join(["is damaged", *faults]))
            made |= {(entry.bytes, entry.xxh3_128): temporary / name for name, entry in manifest.files.items()}
            yield temporary, target
            made |= {(entry.bytes, entry.xxh3_128): target / name for name, entry in manifest.files.items()}
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _checked(self, one: Copied, name: str) -> bytes:
        """The content of a file of the run."""
        content = self.store.read(f"{one.run_place}/{name}")
        if entry_of(content) != one.run_files[name]:
            raise CheckpointError(f"{one.run_place}/{name} is damaged")
        return content

    def _local(self, name: str) -> Path:
        """The path of a name in the index."""
        inside = name if self._inner == "." else name.removeprefix(f"{self._inner}/")
        return self._folder / name if inside == name and self._inner != "." else self._save_dir / inside

    def _named(self, path: Path) -> str:
        """The name in the index of an entry of ``save_dir`` or of the run's folder."""
        if path.parent == self._save_dir:
            return path.name if self._inner == "." else f"{self._inner}/{path.name}"
        return path.name

    # Upload, in the background.

    def offer(self, committed: Committed, *, name: str, tag_last: bool, prune: Prune | None, ranks: Exchange) -> None:
        """Copy a committed checkpoint in the background, unless a newer one is saved before its turn.

        Every rank that has written a part of it calls this, for the same checkpoints in the same order.
        """
        save = Save(name, committed, tag_last, prune, ranks)
        if tag_last:
            self._newest = save
        self._waiting.append(save)
        self._background.submit(partial(self._copy, save))

    def finish(self) -> None:
        """Wait for the copies in flight. If the newest checkpoint is not in the mirror then, log an error."""
        if self._background.is_busy() and dist.is_main_process():
            names = dict.fromkeys(save.name for save in list(self._waiting))
            sizes = [sum(entry.bytes for entry in save.committed.manifest.files.values()) for save in [*self._waiting]]
            logger.info(
                "%s: waiting until %s (%s) is copied to %s.",
                self.store.setting, ", ".join(names), _megabytes(max(sizes, default=0)), self.store.shown,
            )  # fmt: skip
        self._background.wait()
        # Not on several ranks: after a failure one of them may not come here.
        if self._failure is not None and type(self._failure[0].ranks) is Exchange:
            save, _ = self._failure
            self._waiting.append(save)
            self._background.submit(partial(self._copy, save))
            self._background.wait()
        self._background.close()
        newest, self._newest = self._newest, None
        if newest is None or not dist.is_main_process():
            return
        if self._failure is not None:
            logger.error(
                "%s: the newest checkpoint, %s, is NOT in the mirror %s: %s. It is in %s.",
                self.store.setting, newest.name, self.store.shown, self._failure[1], newest.committed.folder,
            )  # fmt: skip
        else:
            self._copy_last_run_files()

    def _copy(self, save: Save) -> None:
        """Called on all ranks that have written a part, for the same saves in the same order."""
        try:
            place = save.ranks.first(lambda: self._begin(save))
            if not place:
                return
            if not place.startswith(_COPIED):
                save.ranks.each(lambda: self._upload(save, place))
            save.ranks.first(lambda: self._complete(save, place.removeprefix(_COPIED)))
            if save.tag_last:
                self._failure = None
        except Exception as error:  # of any kind: the training does not depend on the mirror
            if save.tag_last or self._failure is None:
                self._failure = save, error
            if dist.is_main_process():
                logger.warning(
                    "%s: %s could not be copied to %s (%s). The training continues, and the next save tries again.",
                    self.store.setting, save.name, self.store.shown, error,
                )  # fmt: skip
        finally:
            self._waiting.remove(save)

    def _begin(self, save: Save) -> str:
        """Where a checkpoint is copied to; "": it is skipped."""
        later = self._waiting[self._waiting.index(save) + 1 :]
        newer = next((one for one in later if (one.tag_last if save.tag_last else one.name == save.name)), None)
        if newer is not None:
            is_other = newer.committed.manifest.iteration != save.committed.manifest.iteration
            if save.tag_last and is_other and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: %s is slower than the saves: from now on, a checkpoint is not copied there if a newer one is"
                    " saved before its turn. The newest and the best are.",
                    self.store.setting, self.store.shown,
                )  # fmt: skip
            return ""
        folder = save.committed.folder
        if not is_checkpoint(folder):  # deleted since: a newer one has replaced it
            return ""
        self._refresh()
        text = (folder / MANIFEST_NAME).read_bytes()
        key = entry_of(text).xxh3_128
        known = self._index.find(key)
        if known is not None:
            return f"{_COPIED}{known.place}"
        self._begun = self._manifests[key] = text
        return place_of(self._named(folder).replace("/.", "/").lstrip("."), key)

    def _refresh(self) -> None:
        """Read the index that is there now, if this process has not written it."""
        index, number = read_index(self.store)
        if number != self._number and self._number:
            logger.warning(
                "%s: another process writes checkpoints to %s. Set a URL of its own for each run.",
                self.store.setting, self.store.shown,
            )  # fmt: skip
        if number != self._number or index is None:
            self._index, self._number = index or Index(), number
            self._read_manifests(self._index)

    def _read_manifests(self, index: Index) -> None:
        for one in index.checkpoints:
            if one.key not in self._manifests:
                text = self.store.read(f"{one.place}/{MANIFEST_NAME}")
                if entry_of(text) != one.manifest:
                    raise CheckpointError(f"{self.store.shown}/{one.place}/{MANIFEST_NAME}: is damaged.")
                self._manifests[one.key] = text

    def _upload(self, save: Save, place: str) -> None:
        """Upload the files that this rank has written."""
        committed = save.committed
        own = {name: entry for name, entry in committed.manifest.files.items() if name in committed.own}
        uploaded = dict[tuple[int, str], str]()
        with self._pinned(committed.folder, own) as folder:
            faults, _ = file_faults(folder, replace(committed.manifest, files=own))
            if faults:
                raise CheckpointError(f"{committed.folder}: is damaged: {'; '.join(faults)}.")
            for name, entry in own.items():
                content, target = (entry.bytes, entry.xxh3_128), f"{place}/{name}"
                known = self._uploaded.get(content)
                if known is None or not self._has_copied(known, target):
                    self.store.upload(folder / name, target)
                uploaded[content] = target
        self._uploaded = uploaded  # those of the last checkpoint: the next one is often of the same iteration

    def _has_copied(self, source: str, target: str) -> bool:
        try:
            self.store.copy(source, target)
        except StoreError:  # deleted meanwhile, or too large for this operation
            return False
        return True

    @contextmanager
    def _pinned(self, folder: Path, names: Iterable[str]) -> Iterator[Path]:
        """A folder with these files, which the deletion of the checkpoint does not change."""
        pinned = temporary_sibling(self._save_dir / "mirror")
        try:
            for name in names:
                (pinned / name).parent.mkdir(parents=True, exist_ok=True)
                if not hard_link(folder / name, pinned / name):
                    break
            else:
                yield pinned
                return
        finally:
            shutil.rmtree(pinned, ignore_errors=True)
        yield folder

    def _complete(self, save: Save, place: str) -> str:
        """Make a checkpoint, whose files are uploaded, part of the mirror, and delete what retention does not keep."""
        folder = save.committed.folder
        known = next((one for one in self._index.checkpoints if one.place == place), None)
        if known is None:
            text = self._begun
            run_place, run_files = self._copy_run_files(place)
            self.store.write(f"{place}/{MANIFEST_NAME}", text)
            self._check_sizes(place, save.committed.manifest)
            known = Copied(place, self._named(folder), entry_of(text), run_files, run_place)
        self._publish(self._next_index(known, save.prune))
        return place

    def _check_sizes(self, place: str, manifest: Manifest) -> None:
        sizes = self.store.sizes(place)
        wrong = [
            f"{name} has {sizes.get(name)} bytes instead of {entry.bytes}"
            for name, entry in manifest.files.items()
            if sizes.get(name) != entry.bytes and name not in FOR_PEOPLE
        ]
        if wrong:
            raise StoreError(f"{place}: {'; '.join(wrong)}")

    def _copy_run_files(self, place: str) -> tuple[str, dict[str, FileEntry]]:
        run_place, files = f"{place}/run-{self._number + 1:08d}", dict[str, FileEntry]()
        for name in self._run_files():
            path = self._folder / name
            with suppress(FileNotFoundError):
                if path.stat().st_size > _MAX_RUN_FILE:
                    if name not in self._warned_of_files:
                        self._warned_of_files.add(name)
                        size = _megabytes(path.stat().st_size)
                        logger.warning("%s: %s has %s, and is not copied.", self.store.setting, path, size)
                    continue
                content = path.read_bytes()
                self.store.write(f"{run_place}/{name}", content)
                files[name] = entry_of(content)
        return run_place, files

    def _copy_last_run_files(self) -> None:
        """Copy the files of the run as they are at its end to the newest checkpoint."""
        pointer = None
        with suppress(CheckpointError, OSError):
            pointer = read_pointer(self._save_dir)
        key = _key_of(self._save_dir / pointer) if pointer else None
        newest = None if key is None else self._index.find(key)
        if newest is None:
            return
        try:
            now = {name: entry_of((self._folder / name).read_bytes()) for name in newest.run_files}
            if now == newest.run_files:
                return
            run_place, run_files = self._copy_run_files(newest.place)
            self._unused.append(newest.run_place)
            self._publish(self._next_index(replace(newest, run_place=run_place, run_files=run_files), None))
        except Exception as error:
            logger.warning(
                "%s: the last lines of metrics and logs could not be copied to %s (%s).",
                self.store.setting, self.store.shown, error,
            )  # fmt: skip

    def _next_index(self, new: Copied, prune: Prune | None) -> Index:
        """The index with ``new``, by the names and links of the local folder, without what retention deletes."""
        here = {_key_of(path): self._named(path) for path in checkpoint_folders(self._save_dir)}
        by_name = dict[str, Copied]()
        for one in (*self._index.checkpoints, new):
            name = here.get(one.key, one.name)  # a checkpoint that is saved again gets another name
            if name not in by_name or one.key in here:
                by_name[name] = replace(one, name=name)
        links = {**(self._index.links or {}), **self._links(by_name.values())}
        index = Index(self._number + 1, tuple(by_name.values()), links, self._last(by_name), self._inner, self._run())
        with image_of(index, self._manifests, self._save_dir) as image:
            if prune is not None:
                prune(image / index.folder)
            remove_unlinked(image / index.folder)
            return kept_in(image, index)

    def _links(self, checkpoints: Iterable[Copied]) -> dict[str, str]:
        """The local links to these checkpoints."""
        names = {one.key: one.name for one in checkpoints}
        found = {}
        for link in (link for folder in {self._folder, self._save_dir} for link in links_in(folder)):
            target = real_path(link)
            if target.parent == real_path(self._save_dir) and (name := names.get(_key_of(target) or "")) is not None:
                found[self._named(link)] = name
        return found

    def _last(self, by_name: dict[str, Copied]) -> str | None:
        """The name in ``last_checkpoint``, if that checkpoint is in the mirror."""
        with suppress(CheckpointError, OSError):
            if name := read_pointer(self._save_dir):
                key = _key_of(self._save_dir / name)
                return name if any(one.key == key for one in by_name.values()) else None
        return None

    def _publish(self, index: Index) -> None:
        """Write the index, which makes everything that it lists part of the mirror; then delete what it does not."""
        before = self._index
        text = index.to_bytes()
        self.store.write(index.file_name, text)
        if self.store.read(index.file_name) != text:
            raise StoreError(f"{index.file_name} is not what was written")
        self._index, self._number = index, index.number
        keys, places = {one.key for one in index.checkpoints}, {one.place for one in index.checkpoints}
        self._manifests = {key: text for key, text in self._manifests.items() if key in keys}
        self._unused += [one.place for one in before.checkpoints if one.place not in places]
        try:
            if not self._is_cleaned:
                self._find_unused(places)
            while self._unused:
                self.store.delete_folder(self._unused[-1])
                self._unused.pop()
            # The one before is kept: a reader may have listed it.
            names = [name for name in self.store.entries() if name.startswith("index-")]
            self.store.delete([name for name in names if name < Index(index.number - 1).file_name])
        except (StoreError, ValueError) as error:
            logger.warning("%s: an older copy could not be deleted (%s).", self.store.shown, error)

    def _find_unused(self, places: set[str]) -> None:
        """Find what interrupted copies of earlier processes have left."""
        above = "" if self._inner == "." else f"{self._inner}/"
        there = [f"{above}{name}" for name in self.store.entries(above.rstrip("/")) if is_place(name)]
        self._unused += [place for place in there if place not in places]
        self._unused += [name for name in self.store.entries() if name.startswith(PROBE)]
        self._is_cleaned = True


def _has_all_files(saved: Saved) -> bool:
    """Whether a local checkpoint is complete; a host that shares no folder with others has only its own parts."""
    return saved.manifest is not None and not file_faults(saved.path, saved.manifest, contents=False)[0]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _key_of(path: Path) -> str | None:
    """The key of a checkpoint; None if it cannot be read."""
    try:
        return entry_of((path / MANIFEST_NAME).read_bytes()).xxh3_128
    except OSError:
        return None


def _name_in(image: Path, path: Path) -> str:
    """The name in the index of a checkpoint in an image, which may be a link."""
    return real_path(path).relative_to(real_path(image)).as_posix()


def _put(temporary: Path, target: Path) -> None:
    """Give a downloaded checkpoint its name."""
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        remove_folder(target)
    commit_folder(temporary, target)

"""What is in a mirror: the same report as of a folder of checkpoints, from sizes, or from every byte."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trainwright.base.errors import ConfigError
from trainwright.base.files import real_path
from trainwright.checkpoint.errors import CheckpointError
from trainwright.checkpoint.folder import resume_candidates
from trainwright.checkpoint.manifest import FOR_PEOPLE, MANIFEST_NAME, Manifest, read_manifest
from trainwright.checkpoint.mirror_index import Copied, Index, entry_of, image_of, read_index
from trainwright.checkpoint.mirror_store import MissingObjectError, Store
from trainwright.checkpoint.verify import CheckpointReport, FolderReport, file_faults


def inspect_mirror(url: str, *, contents: bool, setting: str = "mirror") -> FolderReport:
    """The checkpoints in a mirror, each under its path in the run folder; without ``contents`` only sizes are compared.

    Raises:
        ConfigError: the URL is wrong, or there are no checkpoints.
        CheckpointError: the index of the mirror is damaged.
        StoreError: the mirror cannot be read now.
    """
    store = Store(url, setting)
    index, _ = read_index(store)
    if index is None or not index.checkpoints:
        raise ConfigError(f"{store.shown}: contains no checkpoint.")
    with TemporaryDirectory() as temporary:
        found = [_inspected(store, one, Path(temporary), contents=contents) for one in index.checkpoints]
        candidates = _resume_order(index, found, Path(temporary))
    found.sort(key=lambda report: -1 if report.manifest is None else report.manifest.sequence)
    links = _links(index, found)
    complete = [next(report for report in found if report.path == path) for path in candidates]
    resumed = next((report for report in complete if report.is_complete), None)
    linked = {link.points_at for link in links}
    named = [report for report in found if report.path.name[0] != "." or report.path.as_posix() not in linked]
    if resumed is not None and resumed not in named:
        resumed = next(link for link in links if link.folder == resumed.folder)
    return FolderReport(Path(store.shown), (*named, *links), resumed, True, index.last, "")


def _resume_order(index: Index, found: list[CheckpointReport], temporary: Path) -> list[Path]:
    """The names of the checkpoints in the order in which a resume tries them: as in a folder with their manifests."""
    manifests = {}
    for one, report in zip(index.checkpoints, found, strict=True):
        manifests[one.key] = b"" if report.manifest is None else report.manifest.to_bytes()
    with image_of(index, manifests, temporary) as image:
        return [real_path(path).relative_to(real_path(image)) for path in resume_candidates(image / index.folder)]


def _links(index: Index, found: list[CheckpointReport]) -> list[CheckpointReport]:
    """Each link as a report of the checkpoint that it points at."""
    return [
        replace(report, path=Path(link), points_at=name)
        for link, name in sorted((index.links or {}).items())
        for report in found
        if report.path == Path(name)
    ]


def _inspected(store: Store, one: Copied, temporary: Path, *, contents: bool) -> CheckpointReport:
    path, folder = Path(one.name), temporary / one.place
    faults, manifest = list[str](), None
    folder.mkdir(parents=True)
    try:
        text = store.read(f"{one.place}/{MANIFEST_NAME}")
        (folder / MANIFEST_NAME).write_bytes(text)
        manifest = read_manifest(folder)
        if entry_of(text) != one.manifest:
            faults.append(f"{MANIFEST_NAME} is not that of the index")
        faults += (
            _faults_of_contents(store, one, manifest, folder) if contents else _faults_of_sizes(store, one, manifest)
        )
    except MissingObjectError:
        faults.append(f"{MANIFEST_NAME} is missing")
    except CheckpointError as error:
        faults.append(f"{MANIFEST_NAME} {str(error).removeprefix(f'{folder / MANIFEST_NAME}: ')}")
    return CheckpointReport(path, path, None, manifest, tuple(faults))


def _faults_of_sizes(store: Store, one: Copied, manifest: Manifest) -> list[str]:
    sizes = store.sizes(one.place)
    wanted = {name: entry.bytes for name, entry in manifest.files.items() if name not in FOR_PEOPLE}
    return [
        f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]:,} bytes, the manifest says {size:,}"
        for name, size in wanted.items()
        if sizes.get(name) != size
    ]


def _faults_of_contents(store: Store, one: Copied, manifest: Manifest, folder: Path) -> list[str]:
    """Each file is downloaded, read and deleted."""
    faults = list[str]()
    for name, entry in manifest.files.items():
        try:
            store.download(f"{one.place}/{name}", folder / name)
        except MissingObjectError:
            faults.append(f"{name} is missing")
            continue
        faults += file_faults(folder, replace(manifest, files={name: entry}))[0]
        (folder / name).unlink()
    for name, entry in one.run_files.items():
        try:
            if entry_of(store.read(f"{one.run_place}/{name}")) != entry:
                faults.append(f"{one.run_place}/{name} is damaged")
        except MissingObjectError:
            faults.append(f"{one.run_place}/{name} is missing")
    return faults

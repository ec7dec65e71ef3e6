"""Folders of files on a hub: a local folder is used directly, any other is downloaded by huggingface_hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainwright.base.errors import ConfigError, MissingFileError, UserError

PathLike = str | os.PathLike[str]
RepoType = Literal["model", "dataset"]

DEFAULT_ENDPOINT = "https://huggingface.co"
# The id of a repository: an owner and a name, each beginning and ending with a letter, a digit or "_".
_REPO_ID = re.compile(r"\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?", re.ASCII)
_NOT_UPLOADED = [".tmp-*", "**/.tmp-*", "__pycache__", "**/__pycache__/**"]  # temporary files, and Python's cache


def local_folder(
    path_or_id: PathLike,
    *,
    repo_type: RepoType = "model",
    files: Sequence[str] | None = None,
    revision: str | None = None,
) -> Path:
    """The folder that ``path_or_id`` names, on this machine.

    An existing folder is returned unchanged. Otherwise an ``owner/name`` is downloaded from the hub into
    huggingface_hub's cache, which is also used if the hub does not answer (``HF_HUB_OFFLINE=1`` uses only the cache).
    ``HF_ENDPOINT`` sets the hub's address and is read at every call; huggingface_hub finds a token itself
    (``HF_TOKEN``, or ``hf auth login``). Anything that is not an id, such as ``./x``, ``/x``, ``a/b/c`` or a
    `pathlib.Path`, is a path and is never requested from the hub.

    Args:
        files: glob patterns of the files to download; None means all. Ignored for a local folder.
        revision: branch, tag or commit of the repository; None means its main branch. Ignored for a local folder.

    Raises:
        MissingFileError: there is no such folder and no such repository, or the hub cannot be reached. The message
            says what was tried and why it failed.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise MissingFileError(
            f"{path_or_id}: this is a file, not a folder. Use the folder that holds it: {path.parent}"
        )
    if not isinstance(path_or_id, str) or not is_repo_id(path_or_id):
        raise MissingFileError(
            f"{path_or_id}: there is no such folder (working folder: {Path.cwd()}), and it is no hub id, "
            "which would have the form 'owner/name'."
        )
    return _fetched(path_or_id, repo_type, files, revision)


def upload_folder(
    folder: PathLike,
    repo_id: str,
    *,
    repo_type: RepoType = "model",
    private: bool = False,
    commit_message: str | None = None,
) -> str:
    """Upload the files of ``folder`` to the repository ``repo_id`` as one commit; returns the repository's address.

    The repository is created if it does not exist (``private`` applies only then). Files of the same name are
    replaced, other files stay. Temporary files and ``__pycache__`` are not uploaded.

    Raises:
        MissingFileError: ``folder`` does not exist.
        ConfigError: ``repo_id`` does not have the form ``owner/name``.
        UserError: the hub rejects the upload, or cannot be reached.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder to upload (working folder: {Path.cwd()}).")
    if not is_repo_id(repo_id):
        raise ConfigError(f"repo_id: got {repo_id!r}; a repository on a hub is named 'owner/name'.")
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())
    try:
        address = api.create_repo(repo_id, repo_type=repo_type, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type=repo_type,
            commit_message=commit_message or f"Upload {folder.name}",
            ignore_patterns=_NOT_UPLOADED,
        )
    except Exception as error:  # the errors of the hub's HTTP library have no root in common with its own
        raise UserError(
            f"{repo_id}: {folder} could not be uploaded to {endpoint()} as a {repo_type}: {_cause(error)}\n"
            "Uploading needs a token with write permission: log in with `hf auth login`, or set HF_TOKEN."
        ) from error
    return str(address)


def is_repo_id(name: str) -> bool:
    """Whether ``name`` could be a repository on a hub.

    >>> is_repo_id("hezarai/crnn-base-fa-64x256"), is_repo_id("./models/x"), is_repo_id("model")
    (True, False, False)
    """
    return len(name) <= 96 and _REPO_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def endpoint() -> str:
    """The hub's address: the current value of ``HF_ENDPOINT``."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def _fetched(repo_id: str, repo_type: RepoType, files: Sequence[str] | None, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    prefix = f"{repo_id}: there is no such folder (working folder: {Path.cwd()}), and "
    try:
        folder = snapshot_download(
            repo_id,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=None if files is None else list(files),
            endpoint=endpoint(),
            cache_dir=os.environ.get("HF_HUB_CACHE"),  # None: the default of huggingface_hub
            local_files_only=offline,
        )
    except Exception as error:  # the errors of the hub's HTTP library have no root in common with its own
        what = "is not in the cache (HF_HUB_OFFLINE is set)" if offline else f"could not be fetched from {endpoint()}"
        at = f" at revision {revision!r}" if revision else ""
        raise MissingFileError(f"{prefix}the {repo_type} of this name{at} {what}: {_cause(error)}") from error
    if not Path(folder).is_dir():
        raise MissingFileError(f"{prefix}the {repo_type} of this name at {endpoint()} has none of {list(files or ())}.")
    return Path(folder)


def _cause(error: Exception) -> str:
    """The error's type and message, without empty lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    return f"{type(error).__name__}: {' '.join(line for line in lines if line)}"

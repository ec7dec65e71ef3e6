"""Folders on a hub: real huggingface_hub code against a hub on loopback."""

from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import HubServer
from trainwright.base.errors import ConfigError, MissingFileError, UserError
from trainwright.checkpoint.hub import local_folder, upload_folder


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.is_file()}


def test_a_repository_is_fetched_with_all_its_folders(hub: HubServer) -> None:
    write(hub.root / "models/owner/name", config="a", preprocessor__config="ب")
    assert texts(local_folder("owner/name")) == {"config": "a", "preprocessor/config": "ب"}
    write(hub.root / "models/owner/name", config="new")  # a new commit is seen
    assert texts(local_folder("owner/name"))["config"] == "new"


def test_models_and_datasets_of_one_name_are_two(hub: HubServer) -> None:
    write(hub.root / "models/owner/name", which="model")
    write(hub.root / "datasets/owner/name", which="dataset")
    assert texts(local_folder("owner/name")) == {"which": "model"}
    assert texts(local_folder("owner/name", repo_type="dataset")) == {"which": "dataset"}


def test_only_the_asked_files_are_fetched(hub: HubServer) -> None:
    write(hub.root / "models/owner/name", model_dot_safetensors="weights", model_config_dot_yaml="c", a__b_dot_yaml="b")
    assert texts(local_folder("owner/name", files=["*.yaml"])) == {"model_config.yaml": "c", "a/b.yaml": "b"}
    assert not [path for path in hub.requests if path.endswith("safetensors")]
    write(hub.root / "models/owner/other", readme="r")
    with pytest.raises(MissingFileError, match=r"owner/other.*none of \['\*\.yaml'\]"):
        local_folder("owner/other", files=["*.yaml"])


def test_a_folder_that_is_here_wins(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(hub.root / "models/models/x", where="hub")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models/x", where="here")
    assert texts(local_folder("models/x")) == {"where": "here"}
    assert hub.requests == []


def test_the_cache_answers_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    write(hub.root / "models/owner/name", config="a")
    local_folder("owner/name")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert texts(local_folder("owner/name")) == {"config": "a"}
    with pytest.raises(MissingFileError, match=r"owner/other.*not in the cache \(HF_HUB_OFFLINE is set\)"):
        local_folder("owner/other")
    assert hub.requests == []


def test_what_cannot_be_fetched_says_what_was_tried(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError) as caught:
        local_folder("owner/nothing", repo_type="dataset")
    for part in ("owner/nothing", "no such folder", "dataset", hub.url, "RepositoryNotFoundError"):
        assert part in str(caught.value)
    write(hub.root / "models/owner/name", config="a")
    with pytest.raises(MissingFileError, match="at revision 'v7'"):
        local_folder("owner/name", revision="v7")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, where nothing listens
    with pytest.raises(MissingFileError, match=r"could not be fetched from http://127\.0\.0\.1:9"):
        local_folder("owner/name")


def test_the_endpoint_is_read_at_every_call(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(hub.root / "models/owner/name", where="first")
    assert texts(local_folder("owner/name")) == {"where": "first"}
    other = HubServer(tmp_path / "other")
    try:
        write(other.root / "models/owner/name", where="second")
        monkeypatch.setenv("HF_ENDPOINT", other.url + "/")
        assert texts(local_folder("owner/name")) == {"where": "second"}
        assert upload_folder(write(tmp_path / "made", a="1"), "owner/made") == f"{other.url}/owner/made"
        assert (other.root / "models/owner/made/a").is_file()
    finally:
        other.close()


@pytest.mark.parametrize(
    "path", ["./a/b", "/a/b", "a/b/c", "../b", "a", "a//b", "a/", "~/b", "a/b.", "a\\b/c", Path("a/b")]
)
def test_a_path_is_never_asked_for_at_the_hub(path: Any, hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such folder"):
        local_folder(path)
    with pytest.raises(MissingFileError, match=r"this is a file.*Use the folder"):
        local_folder(write(tmp_path, weights="w") / "weights")
    assert hub.requests == []


def test_what_is_uploaded_comes_back(hub: HubServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "made", config_dot_yaml="name: x", sub__weights="w" * 5000, __pycache____x="no")
    (folder / ".tmp-config.yaml-1-00000000-1-0").write_text("half")
    assert upload_folder(folder, "owner/made", commit_message="first") == f"{hub.url}/owner/made"
    assert texts(hub.root / "models/owner/made") == {"config.yaml": "name: x", "sub/weights": "w" * 5000}
    assert texts(local_folder("owner/made")) == {"config.yaml": "name: x", "sub/weights": "w" * 5000}
    upload_folder(write(tmp_path / "second", config_dot_yaml="2"), "owner/made")  # replaces, and keeps the others
    assert texts(hub.root / "models/owner/made") == {"config.yaml": "2", "sub/weights": "w" * 5000}


def test_uploading_says_what_is_wrong(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFileError, match="no such folder to upload"):
        upload_folder(tmp_path / "absent", "owner/name")
    with pytest.raises(ConfigError, match="'owner/name'"):
        upload_folder(tmp_path, "only-a-name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 .*\n.*HF_TOKEN"):
        upload_folder(write(tmp_path / "made", a="1"), "owner/name")

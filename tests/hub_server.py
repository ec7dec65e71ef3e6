"""A hub on loopback, over a folder: as much of the hub's API as huggingface_hub needs to download, create and upload.

Repositories lie at ``root/models/<owner>/<name>/…`` and ``root/datasets/<owner>/<name>/…``. There is one revision,
"main", whose commit is a checksum of what lies there now, so a file that is written into the folder is a new commit.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/]+))?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubServer(ThreadingHTTPServer):
    """Serves ``root`` from a thread until :meth:`close`. ``requests`` are the paths that were asked for."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def folder(self, kind: str, repo_id: str) -> Path:
        """Where a repository lies; ``kind`` is "models" or "datasets"."""
        return self.root / kind / repo_id

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._get(with_content=True)

    def do_HEAD(self) -> None:
        self._get(with_content=False)

    def do_POST(self) -> None:
        path = self._path()
        body = self._body()
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := API.fullmatch(path):
            self._commit(match, body)
        else:
            self._missing("RepoNotFound")

    def log_message(self, format: str, *args: Any) -> None: ...

    def _get(self, *, with_content: bool) -> None:
        path = self._path()
        if match := API.fullmatch(path):
            kind, repo_id, what, revision = match.groups()
            folder = self.server.folder(kind, repo_id)
            if self._is_there(folder, revision):
                files = _files(folder)
                self._json(files if what == "tree" else _info(repo_id, folder, files))
        elif match := FILE.fullmatch(path):
            is_dataset, repo_id, revision, name = match.groups()
            folder = self.server.folder("datasets" if is_dataset else "models", repo_id)
            if self._is_there(folder, revision):
                self._send_file(folder, name, with_content)
        else:
            self._missing("RepoNotFound")

    def _is_there(self, folder: Path, revision: str | None) -> bool:
        if not folder.is_dir():
            self._missing("RepoNotFound")
        elif revision not in (None, "main", _commit_of(folder)):
            self._missing("RevisionNotFound")
        else:
            return True
        return False

    def _send_file(self, folder: Path, name: str, with_content: bool) -> None:
        path = folder / name
        if not path.is_file():
            self._missing("EntryNotFound", {"X-Repo-Commit": _commit_of(folder)})
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": _commit_of(folder), "ETag": f'"{_blob(content)}"'}
        self._send(200, content, "application/octet-stream", headers, with_content=with_content)

    def _create(self, wish: dict[str, Any]) -> None:
        repo_id = f"{wish.get('organization') or 'me'}/{wish['name']}"
        kind = f"{wish.get('type', 'model')}s"
        folder = self.server.folder(kind, repo_id)
        there = folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        address = self.server.url + ("/datasets/" if kind == "datasets" else "/") + repo_id
        self._json({"url": address, "error": "You already created this repo"}, 409 if there else 200)

    def _commit(self, match: re.Match[str], body: bytes) -> None:
        kind, repo_id, what, revision = match.groups()
        folder = self.server.folder(kind, repo_id)
        if not self._is_there(folder, revision):
            return
        if what == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._json({"files": files})
            return
        for line in map(json.loads, body.splitlines()):
            target = folder / line["value"].get("path", "")
            if line["key"] == "file":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "deletedFile":
                target.unlink()
        commit = _commit_of(folder)
        self._json({"commitUrl": f"{self.server.url}/{repo_id}/commit/{commit}", "commitOid": commit})

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", {})

    def _missing(self, code: str, headers: dict[str, str] | None = None) -> None:
        content = json.dumps({"error": code}).encode()
        self._send(404, content, "application/json", {"X-Error-Code": code, **(headers or {})})

    def _send(
        self, status: int, content: bytes, kind: str, headers: dict[str, str], *, with_content: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_content and self.command != "HEAD":
            self.wfile.write(content)


def _files(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        found.append({"type": "file", "path": name, "size": len(content), "oid": _blob(content)})
    return found


def _info(repo_id: str, folder: Path, files: list[dict[str, Any]]) -> dict[str, Any]:
    siblings = [{"rfilename": file["path"]} for file in files]
    return {
        "id": repo_id,
        "sha": _commit_of(folder),
        "private": False,
        "tags": [],
        "downloads": 0,
        "siblings": siblings,
    }


def _commit_of(folder: Path) -> str:
    return hashlib.sha1(json.dumps(_files(folder)).encode(), usedforsecurity=False).hexdigest()


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

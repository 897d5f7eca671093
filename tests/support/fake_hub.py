"""A hub on this machine: the HTTP interface that a download of repositories needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.environment import child_environment

COMMIT = "1" * 40
BRANCH_COMMIT = "2" * 40
# By the names of revisions.
COMMITS = {"main": COMMIT, COMMIT: COMMIT, "branch": BRANCH_COMMIT, BRANCH_COMMIT: BRANCH_COMMIT}


class FakeHub(ThreadingHTTPServer):
    """Serves ``repositories``: files by name, by the repository's id. ``org/gated`` is gated."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.paths: list[str] = []
        # Statuses of the next answers, in place of what was asked for.
        self.failures: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of a client with a cache of its own."""
        return child_environment() | {"HF_ENDPOINT": self.url, "HF_HOME": str(cache)}


@contextlib.contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    server = FakeHub(repositories)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.paths.append(path)
        parts = path.removeprefix("/api/models").strip("/").split("/")
        # Old ids have no organization.
        length = 1 if parts[0] in self.server.repositories else 2
        name, (action, *rest) = "/".join(parts[:length]), parts[length:] or [""]
        if self.server.failures:
            self.reply(self.server.failures.pop(0), b'{"error": "later"}')
        elif name == "org/gated":
            self.reply(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        elif name not in self.server.repositories:
            self.reply(404, b'{"error": "not found"}', {"X-Error-Code": "RepoNotFound"})
        elif action in ("", "revision"):
            self.revision(name, rest[-1] if rest else "main")
        elif action == "tree":
            files = self.server.repositories[name].items()
            entries = [{"type": "file", "path": file, "size": len(data), "oid": etag(data)} for file, data in files]
            self.reply(200, json.dumps(entries).encode())
        else:
            self.file(name, rest[0], "/".join(rest[1:]))

    def revision(self, name: str, revision: str) -> None:
        if revision not in COMMITS:
            self.reply(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": file} for file in self.server.repositories[name]]
        body = {"id": name, "modelId": name, "sha": COMMITS[revision], "private": False, "siblings": siblings}
        self.reply(200, json.dumps(body | {"downloads": 0, "likes": 0, "tags": []}).encode())

    def file(self, name: str, revision: str, file: str) -> None:
        data = self.server.repositories[name].get(file)
        if revision not in COMMITS:
            self.reply(404, b'{"error": "no revision"}', {"X-Error-Code": "RevisionNotFound"})
        elif data is None:
            self.reply(404, b'{"error": "no file"}', {"X-Error-Code": "EntryNotFound"})
        else:
            self.reply(200, data, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMITS[revision]})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        standard = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for key, value in (standard | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()

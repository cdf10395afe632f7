"""A hub on 127.0.0.1: the part of its HTTP interface that huggingface-hub uses to fetch a model.

`Hub` serves folders as repositories and remembers every request. A repository can be made to answer with an error,
to wait, or to cut a file off in the middle, once or always.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Repo:
    """One repository; `error` is (status, X-Error-Code) for every request to it."""

    folder: Path
    error: tuple[int, str | None] | None = None
    wait: float = 0.0  # seconds before each answer
    cut: dict[str, int] = field(default_factory=dict)  # file -> bytes sent before the connection breaks, once
    gone: set[str] = field(default_factory=set)  # files that answer 404
    stall: dict[str, Callable[[], None]] = field(default_factory=dict)  # file -> waited for in its middle

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.folder).encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }


class Hub:
    """The server; use as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, folder: Path, **options: Any) -> Repo:
        self.repos[name] = Repo(folder, **options)
        return self.repos[name]

    def __enter__(self) -> "Hub":
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.headers.append(dict(self.headers))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        served = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repo = self.hub.repos.get((found or served)[1]) if found or served else None
        if repo is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        time.sleep(repo.wait)
        if repo.error:
            status, code = repo.error
            self._send(status, b"{}", {"X-Error-Code": code} if code else {})
        elif served:
            self._file(repo, served[3])
        elif found[2] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in repo.files().items()
            ]
            self._json(tree)
        else:
            siblings = [{"rfilename": name} for name in repo.files()]
            self._json(
                {"id": found[1], "modelId": found[1], "sha": repo.commit, "siblings": siblings, "tags": []}
            )

    def _file(self, repo: Repo, name: str) -> None:
        data = repo.files().get(name)
        if data is None or name in repo.gone:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": repo.commit,
            "Accept-Ranges": "bytes",
        }
        if self.command == "HEAD":
            self._send(200, data, headers)
            return
        status, start = 200, 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, start = 206, int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(
            status, data[start:], headers, cut=repo.cut.pop(name, None), stall=repo.stall.pop(name, None)
        )

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        cut: int | None = None,
        stall: Callable[[], None] | None = None,
    ) -> None:
        try:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD" and stall:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                stall()
                self.wfile.write(body[len(body) // 2 :])
            elif self.command != "HEAD":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

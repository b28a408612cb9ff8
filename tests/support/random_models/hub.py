"""A stand-in for the Hugging Face hub: it lists and sends files as the real one does, and fails as it is told to.

It takes nothing from the code that fetches.
"""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

MAIN_COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
"""Of the branch "main"; of the tag "v1" and the reference "refs/pr/1"."""
_COMMITS = {
    "": MAIN_COMMIT,
    "main": MAIN_COMMIT,
    MAIN_COMMIT: MAIN_COMMIT,
    "v1": OTHER_COMMIT,
    "refs/pr/1": OTHER_COMMIT,
    OTHER_COMMIT: OTHER_COMMIT,
}
_LARGE_SUFFIXES = (".safetensors", ".gguf")
_MIN_CUT_BYTES = 1 << 20


class HubStandIn:
    """A test changes it at will."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.refusals: dict[str, tuple[int, str]] = {}  # path of a URL -> status, X-Error-Code
        self.damaged: dict[str, bytes] = {}  # name of a file -> what is sent instead
        self.cut_after: list[int] = []  # bytes after which the next answers of a mebibyte or more end
        self.resets = False  # a connection that is cut is also reset, as a failing router does
        self.requests: list[tuple[str, int]] = []  # path of a URL, first byte of its Range
        self.tokens: set[str | None] = set()  # Authorization headers
        self.endpoint = ""

    def downloads(self) -> list[tuple[str, int]]:
        """Returns them in order, with the byte from which on."""
        return [(path.rpartition("/")[2], start) for path, start in self.requests if "/resolve/" in path]

    def answer(self, path: str, query: str, start: int, token: str | None) -> bytes | tuple[int, str]:
        """The body for a GET, or the status and error code of a refusal."""
        self.requests.append((path, start))
        self.tokens.add(token)
        if path in self.refusals:
            return self.refusals[path]
        if path.startswith("/api/models/"):
            return self._listing(unquote(path.removeprefix("/api/models/")), "blobs" in parse_qs(query))
        repository, _, rest = path[1:].partition("/resolve/")
        name = rest.partition("/")[2]
        return self.damaged.get(name, self.repositories[repository][name])

    def _listing(self, path: str, with_sizes: bool) -> bytes | tuple[int, str]:
        repository, _, revision = path.partition("/revision/")
        files = self.repositories.get(repository)
        if files is None:
            return 401, "RepoNotFound"
        if revision not in _COMMITS:
            return 404, "RevisionNotFound"
        siblings = [_described(name, data, with_sizes) for name, data in files.items()]
        return json.dumps({"id": repository, "sha": _COMMITS[revision], "siblings": siblings}).encode()


@contextmanager
def hub_stand_in(repositories: dict[str, dict[str, bytes]]) -> Iterator[HubStandIn]:
    hub = HubStandIn(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _described(name: str, data: bytes, with_sizes: bool) -> dict[str, Any]:
    """The hub lists large files with their SHA-256, others with git's hash."""
    if not with_sizes:
        return {"rfilename": name}
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    fields: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(_LARGE_SUFFIXES):
        fields["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
    return fields


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002 (the library's name)
            ...

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            answer = hub.answer(url.path, url.query, start, self.headers.get("Authorization"))
            if isinstance(answer, bytes):
                self._send(answer, start, *url.path.split("/")[-2:])
            else:
                self._refuse(*answer)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, data: bytes, start: int, revision: str, name: str) -> None:
            self.send_response(206 if start else 200)
            self.send_header("X-Repo-Commit", _COMMITS.get(revision, ""))
            self.send_header("ETag", name)
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            is_cut = bool(hub.cut_after) and len(data) >= _MIN_CUT_BYTES
            end = start + hub.cut_after.pop(0) if is_cut else len(data)
            self.wfile.write(data[start:end])
            self.close_connection = is_cut
            if is_cut and hub.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return Handler

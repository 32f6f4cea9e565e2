"""A Hub on loopback: the few routes through which `huggingface_hub` downloads files, served from a directory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `root/models/OWNER/NAME` and `root/datasets/OWNER/NAME`.

    Yields:
        the endpoint, and the paths that were asked for, as they come in.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            wanted = json.loads(self.rfile.read(length) or b"{}").get("paths", [])
            repository = self.repository()
            if repository is None:
                self.missing()
                return
            self.reply([self.entry(repository, name) for name in wanted if (repository / name).is_file()])

        def repository(self) -> Path | None:
            found = re.match(r"/(?:api/)?(models/|datasets/)?([\w.-]+/[\w.-]+)", self.path)
            path = root / (found[1] or "models/") / found[2] if found else None
            return path if path is not None and path.is_dir() else None

        def entry(self, repository: Path, name: str) -> dict[str, object]:
            return {"type": "file", "path": name, "size": (repository / name).stat().st_size, "oid": self.etag(name)}

        def etag(self, name: str) -> str:
            return hashlib.sha1(name.encode()).hexdigest()

        def answer(self, *, body: bool) -> None:
            asked.append(self.path)
            repository = self.repository()
            if repository is None:
                self.missing()
                return
            files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
            if self.path.startswith("/api/"):
                if "/tree/" in self.path:
                    inside = re.sub(r"\?.*", "", self.path.split("/tree/")[1]).partition("/")[2]
                    chosen = [self.entry(repository, name) for name in files if name.startswith(inside)]
                    self.reply(chosen) if chosen else self.missing("EntryNotFound")
                else:
                    self.reply({"id": "x", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
                return
            name = re.sub(r"\?.*", "", self.path).split("/resolve/")[1].partition("/")[2]
            if name not in files:
                self.missing("EntryNotFound")
                return
            content = (repository / name).read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{self.etag(name)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def missing(self, code: str = "RepoNotFound") -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

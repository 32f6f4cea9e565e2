"""A Hub on loopback: the routes through which `huggingface_hub` downloads and pushes files, served from a directory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Container, Iterator, MutableMapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin", ".parquet")
"""Files that the Hub keeps in its large file storage, under their SHA-256."""


@contextmanager
def hub(
    root: Path,
    *,
    token: str | None = None,
    gated: Container[str] = (),
    breaks: MutableMapping[str, list[int]] | None = None,
    ignored: Container[str] = (),
) -> Iterator[tuple[str, list[str]]]:
    """Serve `root/models/OWNER/NAME` and `root/datasets/OWNER/NAME`.

    Args:
        root: files, and where pushed ones come; `root/created.jsonl` has what repositories were asked for.
        token: without it nobody is let in.
        gated: "OWNER/NAME" of repositories whose terms nobody has agreed to.
        breaks: name of a file -> after how many bytes its next answers break off, each once; "upload" breaks uploads.
        ignored: files that the repositories' .gitignore leaves out of commits.

    Yields:
        the endpoint, and the paths that were asked for, as they come in.
    """
    asked: list[str] = []
    breaks = {} if breaks is None else breaks
    stored: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_PUT(self) -> None:
            asked.append(self.path)
            content = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.rpartition("/")[2]
            if breaks.get("upload"):
                breaks["upload"].pop()
                self.close_connection = True
                return
            assert hashlib.sha256(content).hexdigest() == oid
            stored[oid] = content
            self.reply({})

        def do_POST(self) -> None:
            asked.append(self.path)
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.may_enter():
                return
            if self.path == "/api/repos/create":
                self.create(json.loads(sent))
                return
            if self.path == "/api/validate-yaml":
                self.reply({"errors": [], "warnings": []})
                return
            repository = self.repository()
            if repository is None:
                self.missing()
            elif "/commit/" in self.path:
                self.commit(repository, [json.loads(line) for line in sent.splitlines()])
            elif "/preupload/" in self.path:
                self.reply({"files": [self.mode(file["path"]) for file in json.loads(sent)["files"]]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                self.reply({"transfer": "basic", "objects": [self.upload(one) for one in json.loads(sent)["objects"]]})
            else:
                form = self.headers.get("Content-Type") == "application/x-www-form-urlencoded"
                wanted = parse_qs(sent.decode())["paths"] if form else json.loads(sent or b"{}").get("paths", [])
                self.reply([self.entry(repository, name) for name in wanted if (repository / name).exists()])

        # --- what is pushed

        def create(self, wanted: dict[str, object]) -> None:
            name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else str(wanted["name"])
            folder = root / "models" / name
            with (root / "created.jsonl").open("a") as file:
                file.write(json.dumps(wanted) + "\n")
            if folder.is_dir():
                self.reply({"url": f"http://{self.headers['Host']}/{name}"}, 409)
                return
            folder.mkdir(parents=True)
            (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
            self.reply({"url": f"http://{self.headers['Host']}/{name}"})

        def mode(self, path: str) -> dict[str, object]:
            return {
                "path": path,
                "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                "shouldIgnore": path in ignored,
            }

        def upload(self, one: dict[str, object]) -> dict[str, object]:
            if one["oid"] in stored:
                return one
            return one | {"actions": {"upload": {"href": f"http://{self.headers['Host']}/upload/{one['oid']}"}}}

        def commit(self, repository: Path, lines: list[dict[str, dict[str, str]]]) -> None:
            """All or nothing, as git has it: every file is there before the first is written."""
            contents: dict[str, bytes | None] = {}
            for line in lines:
                value = line["value"]
                if str(line["key"]) == "file":
                    contents[value["path"]] = base64.b64decode(value["content"])
                elif str(line["key"]) == "lfsFile":
                    contents[value["path"]] = stored[value["oid"]]
                elif str(line["key"]) == "deletedFile":
                    contents[value["path"]] = None
            for name, content in contents.items():
                if content is None:
                    (repository / name).unlink()
                    continue
                (repository / name).parent.mkdir(parents=True, exist_ok=True)
                (repository / name).write_bytes(content)
            name = "/".join(repository.parts[-2:])
            self.reply({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

        # --- what is read

        def may_enter(self) -> bool:
            if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                self.missing("RepoNotFound", 401)
                return False
            return True

        def repository(self) -> Path | None:
            found = re.match(r"/(?:api/)?(models/|datasets/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:/|\?|$)", self.path)
            path = root / (found[1] or "models/") / found[2] if found else None
            return path if path is not None and path.is_dir() else None

        def entry(self, repository: Path, name: str) -> dict[str, object]:
            path = repository / name
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest()}
            content = path.read_bytes()
            entry = {"type": "file", "path": name, "size": len(content), "oid": blob(content)}
            if name.endswith(LARGE):
                lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
                entry |= {"lfs": lfs}
            return entry

        def answer(self, *, body: bool) -> None:
            asked.append(self.path)
            if not self.may_enter():
                return
            repository = self.repository()
            if repository is None:
                self.missing()
                return
            if "/".join(repository.parts[-2:]) in gated:
                self.missing("GatedRepo", 403)
                return
            revision = re.search(r"/(?:revision|tree|resolve)/([^/?]+)", self.path)
            if revision and unquote(revision[1]) not in ("main", COMMIT):
                self.missing("RevisionNotFound")
                return
            files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
            if self.path.startswith("/api/"):
                if "/tree/" in self.path:
                    inside = unquote(re.sub(r"\?.*", "", self.path.split("/tree/")[1]).partition("/")[2])
                    within = f"{inside}/" if inside else ""
                    chosen = [self.entry(repository, name) for name in files if name.startswith(within)]
                    self.reply(chosen) if chosen else self.missing("EntryNotFound")
                else:
                    self.reply({"id": "x", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
                return
            name = unquote(re.sub(r"\?.*", "", self.path).split("/resolve/")[1].partition("/")[2])
            if name not in files:
                self.missing("EntryNotFound")
                return
            self.file(repository, name, body)

        def file(self, repository: Path, name: str, body: bool) -> None:
            content = (repository / name).read_bytes()
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(begin[1]) if begin else 0
            asked.append(f"{name} from {start}")
            self.send_response(206 if begin else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            large = name.endswith(LARGE)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest() if large else blob(content)}"')
            self.send_header("Content-Length", str(len(content) - start))
            if begin:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if not body:
                return
            if breaks.get(name):
                self.wfile.write(content[start : start + breaks[name].pop(0)])
                self.close_connection = True
                return
            self.wfile.write(content[start:])

        def reply(self, value: object, status: int = 200) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def missing(self, code: str = "RepoNotFound", status: int = 404) -> None:
            self.send_response(status)
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


def blob(content: bytes) -> str:
    """What git calls a file of that content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

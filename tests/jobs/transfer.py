"""What the tests of initializers and exporter share: their processes, a web server, an S3 server, a GCS server."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("HF_", "AWS_", "LUTHIER_", "GOOGLE_", "ACCESS_", "SECRET_", "STORAGE_", "SSL_")


def environment(workspace: Path, **values: str) -> dict[str, str]:
    """That of a step, with none of the surroundings' logins."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    return kept | {
        "LUTHIER_WORKSPACE": str(workspace),
        "HF_HOME": str(workspace / ".hf"),
        "HF_HUB_DISABLE_XET": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        **values,
    }


def start(module: str, *arguments: str, workspace: Path, **values: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"luthier.jobs.{module}", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(workspace, **values),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@dataclass
class Done:
    """How a step ended."""

    code: int
    out: str
    err: str


def step(module: str, *arguments: str, workspace: Path, **values: str) -> Done:
    """Run a step to its end; whatever it says, no secret is in it."""
    process = start(module, *arguments, workspace=workspace, **values)
    out, err = process.communicate(timeout=120)
    for name in ("ACCESS_TOKEN", "SECRET_ACCESS_KEY"):
        assert values.get(name, "no secret") not in out + err
    return Done(process.returncode, out, err)


def fetch(kind: str, uri: str, workspace: Path, **values: str) -> Done:
    return step("initializers", kind, workspace=workspace, STORAGE_URI=uri, **values)


def fails(done: Done, *says: str) -> None:
    """It ended with the code and the one sentence of a user's mistake."""
    assert done.code == 2, (done.out, done.err)
    assert done.err.count("\n") == 1, done.err
    for text in says:
        assert text in done.err


def tree(directory: Path) -> dict[str, bytes]:
    """Names of a directory's files -> content, without hidden ones."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


BIG = bytes(range(256)) * 12_000
"""3 MB, all parts of which differ from their neighbours."""


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def until(condition: object, process: subprocess.Popen[str]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@dataclass
class Web:
    """A web server's files and how it behaves.

    Attributes:
        files: path -> content.
        asked: (path, headers) of each request, in order.
        ranges: whether it gives parts of a file.
        etags: whether it says an ETag.
        breaks: after how many bytes of the next answers the connection breaks, each once.
        hold: whether the next break keeps the connection open until the server stops.
        status: path -> what to answer instead.
        redirect: path -> address.
    """

    files: dict[str, bytes]
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    ranges: bool = True
    etags: bool = True
    breaks: list[int] = field(default_factory=list)
    hold: bool = False
    status: dict[str, int] = field(default_factory=dict)
    redirect: dict[str, str] = field(default_factory=dict)
    address: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def ranges_asked(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.asked]


@contextmanager
def web(site: Web, certificate: Path | None = None) -> Iterator[Web]:
    """Serve it on loopback, over TLS with a certificate (and its key in the same file)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            first = not site.asked  # it is read for its headers alone
            site.asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
            if path in site.redirect or path in site.status or path not in site.files:
                self.send_response(302 if path in site.redirect else site.status.get(path, 404))
                if path in site.redirect:
                    self.send_header("Location", site.redirect[path])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = site.files[path]
            etag = f'"{hashlib.md5(content).hexdigest()}"'
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if site.ranges else None
            if begin and self.headers.get("If-Range", etag) != etag:
                begin = None
            start = int(begin[1]) if begin else 0
            self.send_response(206 if begin else 200)
            if site.etags:
                self.send_header("ETag", etag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if site.breaks and not first:
                self.wfile.write(content[start : start + site.breaks.pop(0)])
                self.wfile.flush()
                if site.hold:
                    site.hold = False
                    site.done.wait()
                self.close_connection = True
                return
            try:
                self.wfile.write(content[start:])
            except OSError:
                self.close_connection = True  # whoever asked for the headers has left

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    site.address = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.done.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class S3:
    """A server that speaks S3, with a bucket `bucket`, and a client of the same making as Amazon's own."""

    client: Any
    access: dict[str, str]

    def put(self, files: dict[str, bytes]) -> None:
        for key, content in files.items():
            self.client.put_object(Bucket="bucket", Key=key, Body=content)

    def objects(self, prefix: str) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        keys = [one["Key"] for one in found]
        return {key.removeprefix(prefix): self.read(key) for key in keys}

    def read(self, key: str) -> bytes:
        return self.client.get_object(Bucket="bucket", Key=key)["Body"].read()


@contextmanager
def s3() -> Iterator[S3]:
    """moto's server on loopback."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {
        "ENDPOINT": f"http://{host}:{port}",
        "ACCESS_KEY_ID": "AKIATESTS",
        "SECRET_ACCESS_KEY": "s3cr3t/of+tests",
        "REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=access["ENDPOINT"],
        aws_access_key_id="AKIATESTS",
        aws_secret_access_key="s3cr3t/of+tests",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    try:
        yield S3(client, access)
    finally:
        client.close()
        server.stop()


@dataclass
class Wire:
    """A line to a server, which breaks.

    Attributes:
        address: what to connect to instead.
        requests: method and path of what was asked for over it, in order.
        ranges: the parts of files that were.
        cut_after: how many bytes of answers go through before the line breaks, once; None for all.
    """

    address: str = ""
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    cut_after: int | None = None
    passed: int = 0


@contextmanager
def wire(server: str, cut_after: int | None) -> Iterator[Wire]:
    """Stand between a client and a server on loopback."""
    line = Wire(cut_after=cut_after)
    host, port = server.removeprefix("http://").split(":")

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((host, int(port))) as there:
                back = threading.Thread(target=self.answers, args=(there,))
                back.start()
                while data := _receive(self.request):
                    line.requests += re.findall(r"^([A-Z]+ /\S*) HTTP/1\.1\r$", data.decode("latin-1"), re.MULTILINE)
                    line.ranges += re.findall(r"\r\nrange: bytes=(\S+)", data.decode("latin-1"), re.IGNORECASE)
                    there.sendall(data)
                there.shutdown(socket.SHUT_WR)
                back.join()

        def answers(self, there: socket.socket) -> None:
            while data := _receive(there):
                line.passed += len(data)
                if line.cut_after is not None and line.passed > line.cut_after:
                    line.cut_after = None
                    break
                self.request.sendall(data)
            self.request.shutdown(socket.SHUT_RDWR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        line.address = f"http://127.0.0.1:{proxy.server_address[1]}"
        yield line
        proxy.shutdown()
        thread.join()


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@contextmanager
def gcs() -> Iterator[str]:
    """An emulator of Google's storage on loopback, with a bucket `bucket`; its address."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket"):
        yield f"http://127.0.0.1:{port}"

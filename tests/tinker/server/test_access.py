"""Who may see what: keys, owners, links, and bodies and names that are meant to do harm."""

from __future__ import annotations

import contextlib
import io
import random
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx
import psutil
import pytest
import zstandard
from fastapi.routing import APIRoute
from tinker.proto import tinker_public_pb2 as proto

from luthier.cli.main import main
from luthier.tinker.server.files import Files
from luthier.tinker.server.http import MOST_BYTES
from luthier.tinker.server.routes import checkpoints, futures, sampling, sessions, training
from tests.tinker.server.postgresql import options_for
from tests.tinker.server.served import Served, serving

MODEL = "debug:llama"
ROUTES = [
    (method, f"/api/v1{route.path}")
    for router in (sessions.router, training.router, sampling.router, futures.router, checkpoints.router)
    for route in router.routes
    if isinstance(route, APIRoute) and route.path != "/healthz"
    for method in sorted(route.methods)
] + [("GET", "/metrics"), ("POST", "/api/v1/retrieve_future")]


@dataclass
class Visitor:
    """Someone with a key.

    Attributes:
        key: theirs.
        http: a client that sends it.
    """

    key: str
    http: httpx.Client

    def post(self, path: str, /, **body: Any) -> Any:
        """Send JSON, and get what is answered, which must be no error."""
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def result(self, path: str, /, **body: Any) -> httpx.Response:
        """What an operation gives."""
        request = self.post(path, **body)["request_id"]
        while (answer := self.http.post("/retrieve_future", json={"request_id": request})).status_code == 408:
            pass
        return answer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access") / "server"


@pytest.fixture(scope="module")
def keys(directory: Path) -> dict[str, str]:
    return {name: command("add", name, directory=directory).strip() for name in ("alice", "bob", "carol")}


def books_of(directory: Path) -> list[str]:
    """Where the keys of a server are."""
    return ["--dir", str(directory), *options_for(directory)]


def command(*words: str, directory: Path) -> str:
    """What `luthier serve keys` says."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["serve", "keys", *words, *books_of(directory)]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def served(directory: Path, keys: dict[str, str]) -> Iterator[Served]:
    with serving(MODEL, directory, "--precision", "fp32") as found:
        yield found


def visitor(served: Served, key: str) -> Visitor:
    return Visitor(key, httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": key}, timeout=60))


@pytest.fixture(scope="module")
def alice(served: Served, keys: dict[str, str]) -> Iterator[Visitor]:
    found = visitor(served, keys["alice"])
    with found.http:
        yield found


@pytest.fixture(scope="module")
def bob(served: Served, keys: dict[str, str]) -> Iterator[Visitor]:
    found = visitor(served, keys["bob"])
    with found.http:
        yield found


@pytest.fixture(scope="module")
def things(alice: Visitor) -> dict[str, str]:
    """What alice has."""
    body = {"tags": [], "sdk_version": "0.38.0", "user_metadata": {"hers": "yes"}, "display_name": "secret plan"}
    session = alice.post("/create_session", **body)["session_id"]
    of_session = {"session_id": session, "base_model": MODEL}
    model = alice.post("/create_model", **of_session, model_seq_id=0, lora_config={"rank": 2})["model_id"]
    of_model = {"model_id": model, "path": "kept"}
    weights = alice.result("/save_weights", **of_model, seq_id=1).json()["path"]
    fixed = alice.result("/save_weights_for_sampler", **of_model, seq_id=2).json()["path"]
    alice.result("/save_weights_external", **of_model, seq_id=3)
    sampler = alice.post("/create_sampling_session", **of_session, sampling_session_seq_id=0)["sampling_session_id"]
    found = {"session": session, "model": model, "weights": weights, "fixed": fixed, "sampler": sampler}
    return found | {"request": f"{model}:1"}


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nothing_is_told_without_a_key(served: Served, things: dict[str, str], method: str, path: str) -> None:
    path = path.format(model_id=things["model"], session_id=things["session"], sampler_id="a", kind="weights", name="b")
    for headers in (
        {},
        {"X-API-Key": ""},
        {"X-API-Key": "tml-wrong"},
        {"Authorization": "Bearer tml-wrong"},
        {"Authorization": "Basic dG1sOng="},
    ):
        answer = httpx.request(method, f"{served.url}{path}", headers=headers, content=b"\xff")
        assert answer.status_code == 401
        assert answer.json() == {"error": "the API key is missing or unknown", "detail": answer.json()["error"]}


def test_a_key_may_come_as_bearer_and_health_asks_for_none(served: Served, keys: dict[str, str]) -> None:
    answer = httpx.get(f"{served.url}/api/v1/sessions", headers={"Authorization": f"bearer {keys['bob']}"})
    assert answer.is_success
    for path in ("/healthz", "/api/v1/healthz"):
        assert httpx.get(f"{served.url}{path}").json() == {"status": "ok"}
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert httpx.get(f"{served.url}{path}").status_code == 404


def test_keys_are_kept_nowhere(served: Served, keys: dict[str, str], things: dict[str, str]) -> None:
    listed = command("list", directory=served.directory).splitlines()
    assert [line.split()[-1] for line in listed[:2]] == ["alice", "bob"]
    assert served.process is not None
    processes = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children()]
    said = [" ".join([*process.cmdline(), *process.environ().values()]).encode() for process in processes]
    kept = [path.read_bytes() for path in (*served.directory.rglob("*"), served.log) if path.is_file()]
    assert len(kept) > 5
    assert not [
        key for key in keys.values() for content in (*said, *kept) if key.removeprefix("tml-").encode() in content
    ]


def test_a_key_that_was_removed_opens_nothing(served: Served, keys: dict[str, str], capsys: Any) -> None:
    carol = visitor(served, keys["carol"])
    with carol.http:
        assert carol.http.get("/sessions").is_success
        command("remove", "carol", directory=served.directory)
        while carol.http.get("/sessions").is_success:  # the list of keys is believed for a second
            pass
        assert carol.http.get("/sessions").status_code == 401
    for words, what in (
        (["add", "alice"], "there is a key named 'alice'"),
        (["add", "a b"], "cannot be a key's name"),
        (["remove", "carol"], "there is no key named 'carol'"),
    ):
        assert main(["serve", "keys", *words, *books_of(served.directory)]) == 2
        assert what in capsys.readouterr().err


def test_it_listens_elsewhere_only_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--model", MODEL, "--port", "0", "--dir", str(tmp_path / "new")]
    for host in ("0.0.0.0", "::"):
        assert main([*words, "--host", host]) == 2
        error = capsys.readouterr().err
        assert "can be reached from elsewhere, and there are no keys" in error
        assert len(error.strip().splitlines()) == 1


def test_a_port_that_is_taken_and_a_directory_in_use_are_told(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--model", MODEL, "--port"]
    assert main([*words, str(served.port), "--dir", str(tmp_path / "new")]) == 2
    assert f"127.0.0.1 port {served.port} cannot be had" in capsys.readouterr().err
    assert main([*words, "0", "--dir", str(served.directory)]) == 2
    assert "another server works in it" in capsys.readouterr().err


def test_files_are_for_this_user_alone(served: Served, things: dict[str, str]) -> None:
    assert stat.S_IMODE(served.directory.stat().st_mode) == 0o700
    assert {"checkpoints", "secret", "worker.log"} <= {path.name for path in served.directory.iterdir()}
    others = [path for path in served.directory.rglob("*") if path.stat().st_mode & 0o077]
    assert others == []


# --- owners -----------------------------------------------------------------------------------------------------------

FOREIGN: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/sessions/{session}", {}),
    ("POST", "/sessions/{session}/finish", {"reason": {"type": "success"}}),
    ("POST", "/session_heartbeat", {"session_id": "{session}"}),
    ("POST", "/sessions/search", {"session_id": "{session}"}),
    ("POST", "/create_model", {"session_id": "{session}", "model_seq_id": 7, "base_model": MODEL}),
    ("POST", "/create_model", {"session_id": "{session}", "model_seq_id": 0, "base_model": MODEL}),
    ("POST", "/load_weights", {"session_id": "{session}", "model_seq_id": 7, "path": "{own}", "optimizer": True}),
    ("POST", "/load_weights", {"session_id": "{mine}", "model_seq_id": 7, "path": "{weights}", "optimizer": True}),
    ("POST", "/load_weights", {"model_id": "{model}", "seq_id": 9, "path": "{own}", "optimizer": False}),
    ("POST", "/get_info", {"model_id": "{model}"}),
    ("POST", "/optim_step", {"model_id": "{model}", "seq_id": 9, "adam_params": {}}),
    ("POST", "/save_weights", {"model_id": "{model}", "seq_id": 9, "path": "a"}),
    ("POST", "/save_weights_for_sampler", {"model_id": "{model}", "seq_id": 9, "path": "a"}),
    ("POST", "/save_weights_external", {"model_id": "{model}", "seq_id": 9, "path": "a"}),
    ("POST", "/create_sampling_session", {"session_id": "{session}", "sampling_session_seq_id": 0}),
    (
        "POST",
        "/create_sampling_session",
        {"session_id": "{mine}", "sampling_session_seq_id": 7, "model_path": "{fixed}"},
    ),
    ("GET", "/samplers/{sampler}", {}),
    (
        "POST",
        "/asample",
        {
            "sampling_session_id": "{sampler}",
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {},
        },
    ),
    ("POST", "/retrieve_future", {"request_id": "{request}"}),
    ("POST", "/cancel_future", {"request_id": "{request}"}),
    ("GET", "/training_runs/{model}", {}),
    ("GET", "/training_runs/{model}/checkpoints", {}),
    ("POST", "/weights_info", {"tinker_path": "{weights}"}),
    ("DELETE", "/training_runs/{model}/checkpoints/weights/kept", {}),
    ("PUT", "/training_runs/{model}/checkpoints/weights/kept/ttl", {"ttl_seconds": 1}),
    ("POST", "/training_runs/{model}/checkpoints/weights/kept/publish", {}),
    ("DELETE", "/training_runs/{model}/checkpoints/weights/kept/publish", {}),
    ("GET", "/training_runs/{model}/checkpoints/external_weights/kept/external_weights_urls", {}),
]


@pytest.fixture(scope="module")
def mine(bob: Visitor) -> str:
    """A session of bob's."""
    return str(bob.post("/create_session", tags=[], sdk_version="0.38.0", user_metadata=None)["session_id"])


@pytest.mark.parametrize(("method", "path", "body"), FOREIGN)
def test_what_is_anothers_is_as_if_it_had_never_been(
    bob: Visitor, alice: Visitor, mine: str, things: dict[str, str], method: str, path: str, body: dict[str, Any]
) -> None:
    never = {
        "session": "0" * 32,
        "model": f"{'0' * 32}:train:0",
        "weights": f"tinker://{'0' * 32}:train:0/weights/kept",
        "fixed": f"tinker://{'0' * 32}:train:0/sampler_weights/kept",
        "sampler": f"{'0' * 32}:sample:0",
        "request": f"{'0' * 32}:train:0:1",
    }
    told = []
    for known in (things, never):
        known = known | {"mine": mine, "own": f"tinker://{mine}:train:0/weights/kept"}
        sent = {key: value.format_map(known) if isinstance(value, str) else value for key, value in body.items()}
        answer = bob.http.request(method, path.format_map(known), json=sent or None)
        told.append((answer.status_code, answer.text))
    assert told[0] == told[1]
    assert told[0][0] in (404, 410) or "search" in path
    assert not [value for value in things.values() if value in told[0][1]]
    assert alice.http.get(f"/training_runs/{things['model']}").json()["last_checkpoint"]["public"] is False


def test_gradients_for_anothers_model_are_as_for_none(bob: Visitor, things: dict[str, str]) -> None:
    answers = []
    for model in (things["model"], f"{'0' * 32}:train:0"):
        body = proto.ForwardBackwardRequest(model_id=model, seq_id=9, loss_fn="cross_entropy").SerializeToString()
        answers.append(bob.http.post("/forward_backward", content=body))
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].text == answers[1].text


@pytest.mark.parametrize("path", ["/sessions", "/training_runs", "/checkpoints", "/metrics"])
def test_lists_name_nothing_of_anothers(
    served: Served, bob: Visitor, alice: Visitor, things: dict[str, str], path: str
) -> None:
    url = f"{served.url}/metrics" if path == "/metrics" else path
    told = bob.http.get(url)
    assert told.is_success
    assert things["session"] not in told.text
    assert path == "/metrics" or things["session"] in alice.http.get(path).text


def test_what_is_published_is_read_by_others_and_changed_by_its_owner_alone(
    bob: Visitor, alice: Visitor, mine: str, things: dict[str, str]
) -> None:
    alice.result("/save_weights", model_id=things["model"], seq_id=4, path="shown")
    place, path = (
        f"/training_runs/{things['model']}/checkpoints/weights/shown",
        f"tinker://{things['model']}/weights/shown",
    )
    load = {"session_id": mine, "model_seq_id": 3, "path": path, "optimizer": True}
    assert bob.http.post("/load_weights", json=load).status_code == 404
    assert alice.http.post(f"{place}/publish").status_code == 204
    assert bob.post("/weights_info", tinker_path=path)["lora_rank"] == 2
    assert bob.result("/load_weights", **load).json()["type"] == "load_weights"
    for method, end in (("DELETE", ""), ("PUT", "/ttl"), ("DELETE", "/publish"), ("POST", "/publish")):
        body = {"ttl_seconds": 1} if end == "/ttl" else None
        assert bob.http.request(method, place + end, json=body).status_code == 404
    assert path not in bob.http.get("/checkpoints").text
    assert alice.http.delete(f"{place}/publish").status_code == 204
    assert bob.http.post("/weights_info", json={"tinker_path": path}).status_code == 404


# --- links, names and bodies ------------------------------------------------------------------------------------------


def test_a_link_opens_its_own_file_until_it_ends_and_nothing_else(
    served: Served, alice: Visitor, things: dict[str, str]
) -> None:
    place = f"/training_runs/{things['model']}/checkpoints/external_weights/kept"
    urls = alice.http.get(f"{place}/external_weights_urls").json()["urls"]
    url = urls["adapter_model.safetensors"]
    assert url.startswith(served.url)
    assert len(httpx.get(url).content) > 1000
    parts = urlsplit(url)
    query = {key: value[0] for key, value in parse_qs(parts.query).items()}
    root, model, name, file = "/files", quote(things["model"], safe=""), "kept", "adapter_model.safetensors"
    assert parts.path == f"{root}/{model}/{name}/{file}"
    longer = str(int(query["expires"]) + 1)
    with_signature = f"expires={query['expires']}&signature={query['signature']}"
    signer = Files(served.directory)
    secret = signer.link(served.url, things["model"], "kept", "../../../../secret", int(query["expires"]))
    late = signer.link(served.url, things["model"], "kept", file, int(time.time()) - 1)
    wrong = [
        f"{parts.path}?expires={longer}&signature={query['signature']}",
        f"{parts.path}?expires={query['expires']}&signature={query['signature'][:-1]}",
        f"{parts.path}?expires={query['expires']}&signature=%ff",
        f"{root}/{model}/{name}/adapter_config.json?{with_signature}",
        f"{root}/{model}/other/{file}?{with_signature}",
        f"{root}/{things['session']}:train:1/{name}/{file}?{with_signature}",
        *(f"{root}/{model}/{name}/{up}secret?{with_signature}" for up in ("../../../../", "..%2f..%2f..%2f..%2f")),
        f"{root}/{model}/{name}/%2fetc%2fpasswd?{with_signature}",
        f"{root}/{model}/..%2fkept/{file}?{with_signature}",
        f"{root}/..%2f..%2fsecret/{name}/{file}?{with_signature}",
        secret.removeprefix(served.url),
        late.removeprefix(served.url),
    ]
    raw = httpx.Client(base_url=served.url)
    with raw:
        for path in wrong:
            answer = raw.get(path)
            assert (answer.status_code, answer.json()["error"]) == (404, "there is no such thing"), path
        assert raw.get(parts.path).status_code == 422
    assert alice.http.delete(place).status_code == 204
    assert httpx.get(url).status_code == 404


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "/etc", "a\\b", "-a", ".hidden", "a\0b", "a b", "a\nb", "x" * 129, "%2e%2e", "é"],
)
def test_names_that_are_paths_are_refused(alice: Visitor, things: dict[str, str], name: str) -> None:
    body = {"model_id": things["model"], "path": name, "seq_id": 5}
    for path in ("/save_weights_for_sampler", "/save_weights_external"):
        answer = alice.http.post(path, json=body)
        assert answer.status_code == 400
        assert "cannot be the name of a checkpoint" in answer.json()["error"]
    for path in (f"tinker://{things['model']}/weights/{name}", f"tinker://{name}/weights/kept"):
        assert alice.http.post("/weights_info", json={"tinker_path": path}).status_code in (400, 404)
    answer = alice.http.delete(f"/training_runs/{things['model']}/checkpoints/weights/{quote(name, safe='')}")
    assert answer.status_code in (400, 404, 405)


def test_bodies_that_are_too_large_packed_or_not(alice: Visitor) -> None:
    def in_parts() -> Iterator[bytes]:
        for _ in range(MOST_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    bomb = zstandard.compress(bytes(MOST_BYTES * 4))
    assert len(bomb) < 100_000
    packed = {"Content-Encoding": "zstd"}
    assert alice.http.post("/get_info", content=in_parts()).status_code == 413
    assert alice.http.post("/get_info", content=bomb, headers=packed).status_code == 413
    assert alice.http.post("/forward_backward", content=bomb, headers=packed).status_code == 413
    assert alice.http.post("/get_info", content=b"not zstd", headers=packed).status_code == 400
    assert alice.http.post("/get_info", content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415
    sound = zstandard.compress(b'{"model_id": "none"}')
    assert alice.http.post("/get_info", content=sound, headers=packed).status_code == 404


def test_bytes_that_are_no_request_and_bodies_that_stop_leave_it_standing(served: Served, alice: Visitor) -> None:
    head = f"POST /api/v1/get_info HTTP/1.1\r\nHost: a\r\nX-API-Key: {alice.key}\r\nContent-Length: 99\r\n\r\n{{"
    generator = random.Random(0)
    for content in (head.encode(), b"GET / HTTP/9\r\n\r\n", *(generator.randbytes(400) for _ in range(20))):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(content)
    assert alice.http.get("/healthz").is_success
    assert "a fault of the server's own" not in served.log.read_text()
    assert "Exception in ASGI application" not in served.log.read_text()

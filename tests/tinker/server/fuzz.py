"""Requests that no client of good will sends, made from good ones by a seeded generator.

    python -m tests.tinker.server.fuzz --requests 20000 --seed 1

ends with an error at the first request that is answered with 500, kills the worker or is never answered.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import struct
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import zstandard
from tinker.proto import tinker_public_pb2 as proto

from luthier.tinker.server import line
from luthier.tinker.server.routes import futures
from tests.tinker.server.house import MODEL, House, house_in

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    2**64,
    10**30,
    -(2**63) - 1,
    int("9" * 400),
    1e308,
    -1e-320,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "a\0b",
    "\N{PILE OF POO}" * 3,
    "../../secret",
    "/etc/passwd",
    "tinker://",
    "tinker://a/weights/..",
    "%2e%2e%2f",
    "x" * 5000,
    "1",
    [],
    {},
    [[]],
    [None],
    [2**70],
    ["", 1],
    {"a": {"b": [1, {"c": None}]}},
    {"luthier.train": "full"},
    {"type": "image", "data": "eA==", "format": "png"},
    {"type": "image_asset_pointer", "location": "x", "format": "png"},
]
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom", "", "\0"]
FIELDS = ["target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask", "clip", "", "\0"]
ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
MODEL_EVERY = 60
"""Requests after which a model that may have been spoilt is left for a new one."""
Request = tuple[str, str, bytes, dict[str, Any]]
"""Method, path, body, headers."""


class Fuzzer:
    """Makes and sends requests.

    Args:
        house: the server.
        seed: of all that is random.
    """

    def __init__(self, house: House, seed: int) -> None:
        self._house = house
        self._random = random.Random(seed)
        self.codes: Counter[int] = Counter()
        self._known: dict[str, str] = {}
        self._next = 0

    async def settle(self) -> None:
        """A session, a model, samplers, a checkpoint and a result that requests may be about."""
        house = self._house
        session = await house.session()
        model = await house.model(session)
        saved = [
            await house.post("/save_weights", model_id=model, seq_id=1, path="kept"),
            await house.post("/save_weights_for_sampler", model_id=model, seq_id=2, path="kept", kind="snapshot"),
            await house.post("/save_weights_external", model_id=model, seq_id=3, path="kept"),
        ]
        paths = [(await house.poll(told["request_id"])).json()["path"] for told in saved]
        sampler = await house.sampler(session, 0, base_model=MODEL)
        known = {"session": session, "model": model, "sampler": sampler, "request": saved[0]["request_id"]}
        self._known = known | dict(zip(("weights", "sampler_weights", "external"), paths, strict=True))
        self._next = 4

    async def send(self, number: int) -> None:
        """Make a request, send it, and see to it that what it began comes to an end."""
        if number % MODEL_EVERY == 0:
            await self.settle()
        request = self._request()
        ended = False
        try:
            await self._send(*request)
            ended = True
        finally:
            if not ended:
                print(f"request {number}: {request}"[:20_000])

    async def _send(self, method: str, path: str, body: bytes, headers: dict[str, Any]) -> None:
        house, generation = self._house, self._house.worker.generation
        response = await house.http.request(method, path, content=body, headers=headers)
        self.codes[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code == 200 and b'"request_id"' in response.content and "future" not in path:
            request = response.json()["request_id"]
            for _ in range(40):
                told = await house.http.post("/retrieve_future", json={"request_id": request})
                if told.status_code != 408:
                    break
                await house.http.post("/cancel_future", json={"request_id": request})
            assert told.status_code == 200, told.text
            assert "the worker died" not in told.text, told.text
        assert house.worker.generation == generation, (house.files.root / "worker.log").read_text()[-3000:]

    # --- making requests ------------------------------------------------------------------------------------------

    def _request(self) -> Request:
        if self._random.random() < 0.35:
            return "POST", "/forward_backward", *self._packed(self._message())
        method, path, body = self._random.choice(self._templates())
        path = self._spoil_path(path)
        if body is None:
            return method, path, self._some_bytes(0.1), {}
        for _ in range(self._random.choice([0, 1, 1, 1, 2, 3])):
            body = self._spoil(body)
        text = json.dumps(body, ensure_ascii=self._random.random() < 0.5).encode("utf-8", "surrogatepass")
        return method, path, *self._packed(self._damage(text))

    def _templates(self) -> list[tuple[str, str, Any]]:
        known, draw = self._known, self._random.randrange
        session, model, sampler = known["session"], known["model"], known["sampler"]
        number = self._next
        self._next += self._random.choice([1, 1, 1, 2])
        of_model = {"model_id": model, "seq_id": number}
        run, kept = f"/training_runs/{quote(model)}", f"/training_runs/{quote(model)}/checkpoints/weights/kept"
        sample = {
            "sampling_session_id": sampler,
            "seq_id": draw(1 << 40),
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 14, 15, 9]}]},
            "sampling_params": {"max_tokens": 3, "seed": 3, "stop": [5], "temperature": 1.0, "top_k": 5, "top_p": 0.9},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 2,
            "prompt_logprobs_last_n": 2,
        }
        create = {
            "session_id": session,
            "model_seq_id": draw(1, 1 << 40),
            "base_model": MODEL,
            "user_metadata": {"a": "b"},
            "lora_config": {"rank": 2, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"},
        }
        load = {"path": known["weights"], "optimizer": True}
        fresh = {"session_id": session, "model_seq_id": draw(1, 1 << 40)}
        reads = [
            *("/healthz", "/training_runs", "/checkpoints", "/sessions", "/get_server_capabilities", run),
            *(f"{run}/checkpoints", f"/sessions/{session}", f"/samplers/{quote(sampler)}", "/nothing", "/../metrics"),
            f"{run}/checkpoints/external_weights/kept/external_weights_urls",
            "/../../files/a/b/c?expires=1&signature=a",
        ]
        plain: list[tuple[str, str, Any]] = [("GET", path, None) for path in reads]
        return [
            *plain,
            *(("POST", f"/{path}", {}) for path in ("client/config", "client/dynamic_config", "telemetry")),
            ("POST", "/copy_weights", {"path": known["weights"]}),
            ("POST", "/create_custom_loss", {}),
            ("DELETE", f"{run}/checkpoints/weights/none", None),
            ("PUT", f"{kept}/ttl", {"ttl_seconds": 100_000}),
            ("POST", f"{kept}/publish", None),
            ("DELETE", f"{kept}/publish", None),
            ("POST", "/create_session", {"tags": ["a"], "sdk_version": "0.38.0", "user_metadata": {"a": 1}}),
            ("POST", "/session_heartbeat", {"session_id": session}),
            ("POST", "/sessions/search", {"user_metadata": {"a": "b"}, "display_name": "a", "limit": 3}),
            ("POST", "/sessions/none/finish", {"reason": {"type": "success"}}),
            ("POST", "/retrieve_future", {"request_id": known["request"], "allow_metadata_only": True}),
            ("POST", "/cancel_future", {"request_id": known["request"]}),
            ("POST", "/get_info", {"model_id": model}),
            ("POST", "/weights_info", {"tinker_path": known["weights"]}),
            *[("POST", "/create_model", create)] * 2,
            *[("POST", "/asample", sample)] * 8,
            *[("POST", "/optim_step", of_model | {"adam_params": ADAM})] * 4,
            ("POST", "/load_weights", load | of_model),
            ("POST", "/load_weights", load | fresh),
            ("POST", "/save_weights", of_model | {"path": f"n{draw(1 << 40)}", "overwrite": True, "ttl_seconds": 9}),
            ("POST", "/save_weights_for_sampler", of_model | {"path": f"n{draw(1 << 40)}", "kind": "snapshot"}),
            ("POST", "/save_weights_for_sampler", of_model | {"sampling_session_seq_id": draw(1 << 40)}),
            ("POST", "/save_weights_external", of_model | {"path": f"n{draw(1 << 40)}", "ttl_seconds": 9}),
            (
                "POST",
                "/create_sampling_session",
                {
                    "session_id": session,
                    "sampling_session_seq_id": draw(1, 1 << 40),
                    "model_path": known["sampler_weights"],
                },
            ),
        ]

    def _message(self) -> bytes:
        """A request of forward_backward, sound or not."""
        draw = self._random
        message = proto.ForwardBackwardRequest(model_id=self._known["model"], seq_id=self._next)
        self._next += 1
        message.loss_fn = draw.choice(LOSSES[:6]) if draw.random() < 0.9 else draw.choice(LOSSES)
        message.forward_only = draw.random() < 0.3
        wanted = FIELDS[:2] if message.loss_fn == "cross_entropy" else [FIELDS[0], *FIELDS[2:4]]
        wanted = [*wanted, FIELDS[4]] if message.loss_fn == "gspo" else wanted
        for _ in range(draw.choice([0, 1, 1, 2, 5])):
            datum, length = message.data.add(), draw.choice([0, 1, 3, 4, 9])
            tokens = [draw.randrange(100) for _ in range(length)]
            datum.model_input.add().encoded_text.tokens = struct.pack(f"<{length}i", *tokens)
            for name in wanted:
                values = [draw.randrange(100) if name == FIELDS[0] else draw.uniform(-1, 1) for _ in range(length)]
                kind = proto.DTYPE_INT64 if name == FIELDS[0] else proto.DTYPE_FLOAT32
                code = "q" if name == FIELDS[0] else "f"
                field = datum.loss_fn_inputs[name]
                field.dense, field.dtype = struct.pack(f"<{length}{code}", *values), kind
                field.shape.append(length)
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
            self._spoil_message(message)
        return self._damage(message.SerializeToString())

    def _spoil_message(self, message: Any) -> None:
        draw = self._random
        match draw.randrange(5):
            case 0:
                config = message.loss_fn_config_v2[draw.choice(["clip_low_threshold", "beta", "x", ""])]
                config.number = draw.choice([0.1, 0.0, -1.0, 1e308, float("nan"), float("inf")])
            case 1:
                message.loss_fn_config_v2["beta"].text = "a"
            case 2:
                message.seq_id = draw.choice([-(1 << 31), -1, 0, 1, (1 << 31) - 1, self._next + 5])
            case _ if message.data:
                self._spoil_datum(draw.choice(message.data))
            case _:
                message.data.add()

    def _spoil_datum(self, datum: Any) -> None:
        draw = self._random
        if draw.random() < 0.3:
            chunk = datum.model_input.add()
            if draw.random() < 0.5:
                chunk.encoded_text.tokens = draw.choice([b"", b"\1", b"\xff" * 4, b"\0\0\0\x7f" * 2, b"\5\0\0\0"])
            elif draw.random() < 0.5:
                chunk.image.data = b"\x89PNG"
            return
        name = draw.choice([*datum.loss_fn_inputs] * 3 + FIELDS)
        field = datum.loss_fn_inputs[name]
        match draw.randrange(7):
            case 0:
                field.dtype = draw.choice([0, 1, 2, 3, 4, 99])
            case 1:
                del field.shape[:]
                sides = [[], [0], [1, 4], [4, 1], [2, 2], [len(field.dense) // 4, 0], [-1], [1 << 62, 4], [1 << 40] * 3]
                field.shape.extend(draw.choice(sides))
                if 0 in field.shape:
                    field.dense = b""
            case 2:
                numbers = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38]
                field.dense = b"".join(struct.pack("<f", draw.choice(numbers)) for _ in range(len(field.dense) // 4))
            case 3:
                field.dense = draw.choice([b"", b"\1", struct.pack("<q", -100), struct.pack("<q", 1 << 62)])
            case 4:
                field.dense = field.dense[: draw.randrange(1 + len(field.dense))]
            case 5:
                del datum.loss_fn_inputs[name]
            case 6:
                length = len(field.dense) // 8
                crow = draw.choice([[*range(length + 1)], [0] * (length + 1), [0, length], [0, -5, 9], [1 << 60]])
                col = draw.choice([[0] * length, [7] * length, [-1], [1 << 60]])
                field.sparse_csr.values = draw.choice([field.dense, b"\0" * 8])
                field.sparse_csr.crow_indices = struct.pack(f"<{len(crow)}q", *crow)
                field.sparse_csr.col_indices = struct.pack(f"<{len(col)}q", *col)
                del field.shape[:]
                field.shape.extend(draw.choice([[length, 3], [length, 1 << 50], [2, -1], [length]]))

    def _spoil(self, body: Any) -> Any:
        """A good body with something else in one place."""
        draw, whole = self._random, {"body": copy.deepcopy(body)}
        at: Any = whole
        key: Any = "body"
        while isinstance(at[key], dict | list) and at[key] and draw.random() < 0.85:
            at = at[key]
            key = draw.choice([*at]) if isinstance(at, dict) else draw.randrange(len(at))
        match draw.randrange(8):
            case 0 if isinstance(at, dict) and at is not whole:
                del at[key]
            case 1 if isinstance(at[key], dict):
                at[key][draw.choice(["x", "", "type", "kind", "user_metadata", "\0"])] = draw.choice(NASTY)
            case 2:
                at[key] = [[[at[key]]]]
            case _:
                at[key] = draw.choice(NASTY)
        return whole["body"]

    def _spoil_path(self, path: str) -> str:
        draw = self._random
        if draw.random() < 0.15:
            parts = path.split("/")
            nasty = [str(value) for value in NASTY if value is not None]
            parts[draw.randrange(1, len(parts))] = quote(draw.choice(nasty)[:300], safe="%")
            path = "/".join(parts)
        if draw.random() < 0.2:
            more = [f"{key}={quote(str(draw.choice(NASTY)))}" for key in ("limit", "offset", "expires") for _ in "ab"]
            path += ("&" if "?" in path else "?") + "&".join(draw.sample(more, 2))
        return path

    def _damage(self, content: bytes) -> bytes:
        draw = self._random
        if draw.random() > 0.12 or not content:
            return content
        spoilt, place = bytearray(content), draw.randrange(len(content))
        match draw.randrange(4):
            case 0:
                spoilt[place] = draw.randrange(256)
            case 1:
                del spoilt[place:]
            case 2:
                spoilt[place:place] = draw.choice([b"\xff\xfe", b"\\ud800", b"\0", b"1e999", b"NaN", b"[" * 100_000])
            case 3:
                spoilt = bytearray(draw.randbytes(len(content)))
        return bytes(spoilt)

    def _packed(self, content: bytes) -> tuple[bytes, dict[str, Any]]:
        draw = self._random
        if draw.random() > 0.1:
            return content, {}
        packed = zstandard.compress(content)
        return draw.choice(
            [
                (packed, {"content-encoding": "zstd"}),
                (self._damage(packed), {"content-encoding": "zstd"}),
                (content, {"content-encoding": draw.choice(["zstd", "gzip", "x"])}),
                (content, {"content-type": draw.choice(["text/plain", "multipart/form-data", b"\xff"])}),
                (content, {"x-api-key": draw.choice(["", "x", b"\xff"])}),
            ]
        )

    def _some_bytes(self, share: float) -> bytes:
        return self._random.randbytes(20) if self._random.random() < share else b""


def fuzz(house: House, seed: int, requests: int) -> Counter[int]:
    """Send requests one after the other.

    Returns:
        how many were answered with which code.
    """
    fuzzer = Fuzzer(house, seed)

    async def all_of_them() -> None:
        for number in range(requests):
            await fuzzer.send(number)

    house.run(all_of_them())
    return fuzzer.codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    futures.HOLD_SECONDS, line.GAP_SECONDS = 1.0, 0.0
    logging.getLogger("luthier").setLevel(logging.ERROR)  # of 20,000 requests most are refused
    with tempfile.TemporaryDirectory() as directory, house_in(Path(directory)) as house:
        codes = fuzz(house, given.seed, given.requests)
        print(f"{given.requests} requests, seed {given.seed}: {dict(sorted(codes.items()))}")


if __name__ == "__main__":
    main()

"""A server inside the test's own process over a real worker, so that its clock and its books can be looked at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto

from luthier.tinker.server.app import build_app
from luthier.tinker.server.auth import Doorkeeper
from luthier.tinker.server.files import Files
from luthier.tinker.server.metrics import Metrics
from luthier.tinker.server.process import WorkerProcess
from luthier.tinker.server.service import Service
from luthier.tinker.server.store import Store, database_of
from tests.tinker.server.postgresql import database_for

KEY = "tml-a-key-of-the-house"
MODEL = "debug:llama"
Result = TypeVar("Result")


class House:
    """The server, on an event loop of its own in a thread.

    Args:
        directory: of its files.
    """

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.store = Store(database_of(directory, database_for(directory)))
        arguments = {"model": MODEL, "precision": "fp32", "device": "cpu", "parallel": None}
        arguments |= {"tokens_per_microbatch": 4096, "slots": 4}
        self.worker = WorkerProcess(arguments, directory / "worker.log", directory / "tokenizer")
        self.files = Files(directory)
        self.service = Service(self.store, self.files, self.worker, (MODEL,), Metrics())

    async def open(self) -> None:
        """Let it work."""
        self.supervision = await self.worker.start()
        await self.service.open()
        app = build_app(self.service, Doorkeeper(self.store, open_house=True))
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://house/api/v1", headers={"X-API-Key": KEY})

    async def close(self) -> None:
        """Let it end."""
        self.supervision.cancel()
        await self.service.close()
        await self.worker.stop()
        await self.http.aclose()
        self.store.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def post(self, path: str, /, **body: Any) -> Any:
        """Send JSON, and get what is answered, which must be no error."""
        response = await self.http.post(path, json=body)
        assert response.is_success, response.text
        return response.json()

    async def poll(self, request_id: str) -> httpx.Response:
        """The result of an operation, waited for."""
        while True:
            response = await self.http.post("/retrieve_future", json={"request_id": request_id})
            if response.status_code != 408:
                return response

    async def session(self) -> str:
        """A new session."""
        body = {"tags": [], "sdk_version": "0.38.0", "user_metadata": {}}
        return str((await self.post("/create_session", **body))["session_id"])

    async def model(self, session: str, number: int = 0) -> str:
        """A new model, of the same weights each time."""
        body = {"session_id": session, "model_seq_id": number, "base_model": MODEL}
        told = await self.post("/create_model", **body, lora_config={"rank": 2, "seed": 1})
        assert (await self.poll(told["request_id"])).is_success
        return str(told["model_id"])

    async def train(self, model: str, number: int, *, forward: bool = False) -> str:
        """Post the gradient of one datum."""
        tokens = types.ModelInput.from_ints([3, 14, 15, 9])
        fields = {"target_tokens": [14, 15, 9, 2], "weights": [1.0, 1.0, 1.0, 1.0]}
        data = types.ForwardBackwardInput(
            data=[types.Datum(model_input=tokens, loss_fn_inputs=fields)],
            loss_fn="cross_entropy",
        )
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(model_id=model, seq_id=number, forward_backward_input=data)
        )
        message.forward_only = forward
        response = await self.http.post("/forward_backward", content=message.SerializeToString())
        assert response.is_success, response.text
        return str(response.json()["request_id"])

    async def step(self, model: str, number: int) -> str:
        """Post an optimizer step."""
        adam = types.AdamParams(learning_rate=1e-2).model_dump()
        return str((await self.post("/optim_step", model_id=model, seq_id=number, adam_params=adam))["request_id"])

    async def logprobs(self, model: str, number: int) -> bytes:
        """What the model makes of the datum now."""
        answer = await self.poll(await self.train(model, number, forward=True))
        message = proto.ForwardBackwardOutput()
        message.ParseFromString(answer.content)
        return message.loss_fn_outputs[0].fields["logprobs"].data

    async def sample(self, sampler: str, number: int, tokens: int = 4, **more: Any) -> str:
        """Post a request to sample."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 14, 15]}]}
        params = {"max_tokens": tokens, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params}
        return str((await self.post("/asample", num_samples=1, **body, **more))["request_id"])

    async def sampler(self, session: str, number: int, **of: str) -> str:
        """A new sampler."""
        body = {"session_id": session, "sampling_session_seq_id": number, **of}
        return str((await self.post("/create_sampling_session", **body))["sampling_session_id"])


@contextmanager
def house_in(directory: Path) -> Iterator[House]:
    """A server for as long as the block."""
    house = House(directory)
    try:
        house.run(house.open())
        try:
            yield house
        finally:
            house.run(house.close())
    finally:
        house.loop.call_soon_threadsafe(house.loop.stop)
        house.thread.join()
        house.loop.close()

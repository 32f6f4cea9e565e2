"""What happens at the same moment, what comes late or never, and what is left behind."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from luthier.errors import ConfigError
from luthier.tinker.server import line, samplers, upkeep
from luthier.tinker.server import store as books
from luthier.tinker.server.files import Files
from luthier.tinker.server.records import Model, Operation
from tests.tinker.server.house import MODEL, House, house_in

HALF_AN_HOUR = 1800.0


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house_in(tmp_path_factory.mktemp("house")) as found:
        yield found


def test_the_same_request_many_times_at_once_is_done_once(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        many, once = await house.model(session, 0), await house.model(session, 1)
        for model, times in ((many, 9), (once, 1)):
            posted = await asyncio.gather(*(house.train(model, 1) for _ in range(times)))
            posted += await asyncio.gather(*(house.step(model, 2) for _ in range(times)))
            assert set(posted) == {f"{model}:1", f"{model}:2"}
        assert await house.logprobs(many, 3) == await house.logprobs(once, 3)
        other = await house.http.post(
            "/optim_step", json={"model_id": many, "seq_id": 2, "adam_params": {"learning_rate": 1.0}}
        )
        assert (other.status_code, "another request" in other.text) == (400, True)

    house.run(case())


def test_a_worker_that_dies_is_replaced_and_nothing_is_done_twice_or_lost(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        broken, whole = await house.model(session, 0), await house.model(session, 1)
        for model in (whole, broken):
            await house.train(model, 1)
            await house.poll(await house.step(model, 2))
        path, _ = [await named(house, model, 3) for model in (whole, broken)]
        fixed = await house.sampler(session, 0, model_path=path)
        before = await house.poll(await house.sample(fixed, 1))
        assert before.headers["content-type"] == "application/x-protobuf"
        for model in (whole, broken):
            posted = [await house.train(model, 4), await house.step(model, 5), await house.train(model, 6)]
            if model == broken:
                kill_worker()
            posted.append(await house.step(model, 7))
            for request in posted:
                assert "error" not in (await house.poll(request)).text
        assert await house.logprobs(broken, 8) == await house.logprobs(whole, 8)
        assert (await house.poll(await house.sample(fixed, 2))).headers["content-type"] == "application/x-protobuf"
        assert house.service.metrics.waiting() == 0

    house.run(case())


def test_a_sample_that_is_cancelled_leaves_nothing_behind(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        sampler = await house.sampler(session, 0, base_model=MODEL)
        for number in range(8):  # some end before they are cancelled, some after, some in the very moment
            request = await house.sample(sampler, number, tokens=2 * number)
            polled, *cancelled = await asyncio.gather(
                house.poll(request), *(house.http.post("/cancel_future", json={"request_id": request}) for _ in "ab")
            )
            assert [one.status_code for one in (polled, *cancelled)] == [200, 204, 204]
            assert house.service.operations[request].status in ("done", "failed")
        assert house.service.metrics.waiting() == 0
        assert not any(call.startswith(sampler) for call in house.worker._calls)

    house.run(case())


def test_what_a_vanished_client_has_waiting_is_dropped_and_the_client_may_come_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        session = await house.session()
        model, straight = await house.model(session, 0), await house.model(session, 1)
        sampler = await house.sampler(session, 0, base_model=MODEL)
        for one in (model, straight):
            await house.train(one, 1)
            await house.poll(await house.step(one, 2))
        waits = [await house.step(model, 5), await house.sample(sampler, 1, tokens=100_000)]
        monkeypatch.setattr(upkeep, "SILENCE_SECONDS", -1.0)
        await upkeep.look_after(house.service, time.time())
        monkeypatch.undo()
        for request in waits:
            assert "has not been heard of" in (await house.poll(request)).json()["error"]
        assert await house.logprobs(model, 3) == await house.logprobs(straight, 3)

    house.run(case())


def test_a_number_that_never_comes_is_passed_over_and_its_step_is_not_taken(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        model = await house.model(await house.session())
        before = await house.logprobs(model, 1)
        monkeypatch.setattr(line, "GAP_SECONDS", 0.0)
        await house.train(model, 2)
        told = (await house.poll(await house.step(model, 4))).json()
        assert "request 3 never came" in told["error"]
        assert (await house.http.post("/retrieve_future", json={"request_id": f"{model}:3"})).json()["error"]
        assert await house.logprobs(model, 5) == before

    house.run(case())


def test_a_body_that_cannot_be_read_uses_up_its_number(house: House) -> None:
    async def case() -> None:
        model = await house.model(await house.session())
        adam = {"type": "adam", "learning_rate": float("nan")}
        for number, (path, body) in enumerate(
            [
                ("optim_step", {"adam_params": adam}),
                ("save_weights", {"path": 7}),
                ("load_weights", {"path": [1]}),
                ("save_weights_for_sampler", {"kind": "none"}),
                ("save_weights_external", {}),
            ],
            1,
        ):
            sent = json.dumps({"model_id": model, "seq_id": number, **body})
            assert (await house.http.post(f"/{path}", content=sent)).status_code == 422
        assert await house.logprobs(model, 6)

    house.run(case())


def test_weights_expire_with_their_files_their_links_and_their_samplers(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        path = await named(house, model, 1, ttl_seconds=600)
        sampler = await house.sampler(session, 0, model_path=path)
        assert (await house.poll(await house.sample(sampler, 1))).is_success
        external = await house.post("/save_weights_external", model_id=model, seq_id=2, path="out", ttl_seconds=600)
        await house.poll(external["request_id"])
        told = await house.http.get(f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls")
        url = told.json()["urls"]["adapter_config.json"]
        assert (await house.http.get(url, headers={"X-API-Key": ""})).is_success
        await upkeep.look_after(house.service, time.time() + 500)
        assert (await house.http.get(url)).is_success
        await upkeep.look_after(house.service, time.time() + 700)
        assert (await house.http.get(url)).status_code == 404
        assert (await house.http.get(f"/samplers/{sampler}")).status_code == 404
        assert (await house.http.get(f"/training_runs/{model}/checkpoints")).json() == {"checkpoints": []}
        directories = [one for one in (house.files.root / "checkpoints").rglob("*") if model.split(":")[0] in str(one)]
        assert not [one for one in directories if one.is_file()]

    house.run(case())


def test_a_session_that_ends_while_a_sampler_is_loaded_leaves_none_behind(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        sampler = await house.sampler(session, 0, model_path=await named(house, model, 1))
        request = await house.sample(sampler, 1)
        finished, polled = await asyncio.gather(
            house.http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}}), house.poll(request)
        )
        assert (finished.status_code, polled.status_code) == (204, 200)
        samplers = house.service.samplers
        assert sampler not in samplers.records
        assert sampler not in samplers._loaded
        assert sampler not in samplers._locks

    house.run(case())


def test_results_and_what_a_closed_session_would_go_on_from_are_forgotten(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        kept = await house.train(model, 1)
        result = await house.poll(kept)
        assert (await house.poll(kept)).content == result.content  # it may not have arrived
        later = time.time() + HALF_AN_HOUR
        await upkeep.look_after(house.service, later)
        assert kept in house.service.operations  # a worker that dies would have to do it again
        await house.http.post(f"/sessions/{session}/finish", json={"reason": {"type": "success"}})
        await upkeep.look_after(house.service, later)
        assert (await house.poll(kept)).status_code == 404
        assert not [one for one in house.service.operations if one.startswith(model)]

    house.run(case())


def test_a_restarted_line_waits_for_nothing_that_was_struck_out(house: House) -> None:
    async def case() -> None:
        model = await house.model(await house.session())
        await house.logprobs(model, 1)
        for request in (await house.train(model, 2), await house.step(model, 3)):
            await house.poll(request)
        await upkeep.look_after(house.service, time.time() + HALF_AN_HOUR)
        read, line_of = house.store.run, books.operations.c.line
        [record] = await read(lambda c: books.load(c, Model, books.models.c.id == model))
        known = await read(lambda c: books.load(c, Operation, line_of == model))
        assert [one.number for one in sorted(known, key=lambda one: one.number)] == [2, 3]
        assert line.Line(house.service, record, known).next == 4

    house.run(case())


def test_weights_that_were_loaded_are_not_read_again(house: House) -> None:
    async def case() -> None:
        model = await house.model(await house.session())
        await house.train(model, 1)
        await house.poll(await house.step(model, 2))
        saved = (await house.post("/save_weights", model_id=model, seq_id=3, path="a", overwrite=True))["request_id"]
        path = (await house.poll(saved)).json()["path"]
        loaded = await house.post("/load_weights", model_id=model, seq_id=4, path=path, optimizer=True)
        assert "error" not in (await house.poll(loaded["request_id"])).text
        before = await house.logprobs(model, 5)
        overwritten = copy.copy(house.service.checkpoints[path])
        await upkeep.remove_checkpoint(house.service, overwritten)  # too late: another has its name
        assert path in house.service.checkpoints
        await house.http.delete(f"/training_runs/{model}/checkpoints/weights/a")
        await house.service.lines[model].unload()
        assert await house.logprobs(model, 6) == before

    house.run(case())


def test_samplers_of_every_step_do_not_fill_the_worker_and_come_back_to_the_bit(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        made, found = [], []
        for number in range(4):
            await house.train(model, 3 * number + 1)
            await house.step(model, 3 * number + 2)
            body = {"model_id": model, "seq_id": 3 * number + 3, "sampling_session_seq_id": number}
            told = await house.poll((await house.post("/save_weights_for_sampler", **body))["request_id"])
            made.append(told.json()["sampling_session_id"])
            found.append(await seeded(house, made[-1], 0))
        assert len(set(found)) == 4
        assert len([name for name in house.service.samplers._loaded if name in made]) == 1
        again = [await seeded(house, name, 1) for name in made]
        assert again == found
        assert not house.service.samplers._growing

    monkeypatch.setattr(samplers, "IDLE", 1)
    house.run(case())


def test_a_sampler_keeps_its_weights_when_another_wants_its_number(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        await house.sampler(session, 0, base_model=MODEL)
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        told = await house.poll((await house.post("/save_weights_for_sampler", **body))["request_id"])
        assert "another sampler has it" in told.json()["error"]

    house.run(case())


def test_a_model_that_was_never_made_takes_no_calls(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        saved = await house.post("/save_weights", model_id=model, path="damaged", seq_id=1)
        path = (await house.poll(saved["request_id"])).json()["path"]
        shutil.rmtree(house.files.checkpoint(model, "weights", "damaged"))
        given = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
        made = (await house.post("/load_weights", **given))["request_id"]
        told = [await house.poll(made), await house.poll(await house.train(f"{session}:train:1", 1))]
        assert all(one.json()["category"] == "user" for one in told)
        assert "never made" in told[1].text

    house.run(case())


def test_samplers_that_nobody_uses_go_though_their_client_stays(house: House) -> None:
    async def case() -> None:
        session = await house.session()
        model = await house.model(session)
        posted = []
        for number in (0, 1):
            body = {"model_id": model, "sampling_session_seq_id": number, "seq_id": number + 1, "kind": "snapshot"}
            posted.append((await house.post("/save_weights_for_sampler", **body))["request_id"])
        unused, used = [(await house.poll(one)).json()["sampling_session_id"] for one in posted]
        tomorrow = time.time() + 25 * 3600
        house.service.samplers.used[used] = tomorrow - 60
        await upkeep.look_after(house.service, tomorrow)
        assert unused not in house.service.samplers.records
        assert not house.files.sampler(unused).exists()
        assert used in house.service.samplers.records

    house.run(case())


def test_a_directory_belongs_to_its_base(tmp_path: Path) -> None:
    made = {"arch": "LlamaForCausalLM", "dtype": "float32", "weights": "12ab"}
    Files(tmp_path).bind(made)
    Files(tmp_path).bind(made | {"weights": None})  # on a layout nobody has them whole
    for key, other in (("arch", "GPT2LMHeadModel"), ("dtype", "bfloat16"), ("weights", "34cd")):
        with pytest.raises(ConfigError, match=f"the {key} of its models' base is {made[key]}, not {other}"):
            Files(tmp_path).bind(made | {key: other})


async def named(house: House, model: str, number: int, **more: int) -> str:
    """Weights with a name to sample from."""
    body = {"model_id": model, "seq_id": number, "path": f"at{number}", **more}
    answer: httpx.Response = await house.poll((await house.post("/save_weights_for_sampler", **body))["request_id"])
    return str(answer.json()["path"])


async def seeded(house: House, sampler: str, number: int) -> bytes:
    """A text that depends on the weights alone, with its log-probabilities."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 14, 15]}]}
    params = {"max_tokens": 8, "stop": [], "seed": 0}
    body = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "sampling_params": params}
    return (await house.poll((await house.post("/asample", num_samples=1, **body))["request_id"])).content


def kill_worker() -> None:
    """`kill -9` of this process's worker."""
    for process in psutil.Process().children(recursive=True):
        if "luthier.tinker.server.worker" in process.cmdline():
            os.kill(process.pid, signal.SIGKILL)

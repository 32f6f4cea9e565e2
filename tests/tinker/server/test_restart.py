"""`kill -9` of the server in the middle of two clients' loops: they wait, go on, and end as if nothing had been."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from tinker import types

from tests.soak import soaked
from tests.tinker.server.served import Served, ints, serving

MODEL = "debug:llama"
ROUNDS = soaked(3, 17)
"""Of each loop; six operations each, so 204 of both in the end."""
KILLS = soaked(1, 5)


def loop(served: Served, seed: int, told: Callable[[], object]) -> dict[str, Any]:
    """Mixed operations, and what became of the weights.

    Args:
        seed: of everything that the loop does.
        told: called after each operation whose result is there.
    """
    generator = random.Random(seed)
    service = served.client()
    client = service.create_lora_training_client(MODEL, rank=2 + seed, seed=seed).result()
    found: list[Any] = []
    saved = ""
    for number in range(ROUNDS):
        tokens = [generator.randrange(400) for _ in range(generator.randrange(3, 12))]
        datum = types.Datum(
            model_input=ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        calls = [  # as a pipelined loop does: sent before anything is waited for
            client.forward_backward([datum], "cross_entropy"),
            client.forward_backward([datum, datum], "cross_entropy"),
            client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)),
        ]
        for call in calls:
            found.append(call.result().metrics)
            told()
        if number % 4 == 1:
            saved = client.save_state(f"round{number}").result().path
        elif number % 4 == 3:
            client = service.create_training_client_from_state_with_optimizer(saved).result()
        else:
            found.append(client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)
        told()
        sampler = client.save_weights_and_get_sampling_client().result()
        told()
        params = types.SamplingParams(max_tokens=4, seed=number)
        found.append([one.tokens for one in sampler.sample(ints(tokens), 2, params).result().sequences])
        told()
    path = client.save_weights_external("end").result().path
    links = served.rest().get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(links["adapter_model.safetensors"]) as response:
        weights = response.read()
    return {"found": found, "weights": weights}


@pytest.mark.repeats
def test_loops_outlive_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path / "server", "--precision", "fp32") as served, ThreadPoolExecutor(2) as threads:
        expected = [loop(served, seed, lambda: None) for seed in (1, 2)]
        done = Semaphore(0)
        loops = [threads.submit(loop, served, seed, done.release) for seed in (1, 2)]
        moments = sorted(random.Random(0).sample(range(2 * 6 * ROUNDS - 20), KILLS))
        passed = 0
        for moment in moments:
            while passed <= moment:
                assert done.acquire(timeout=300), served.log.read_text()[-4000:]
                passed += 1
            served.kill()
            served.start()
        broken = [future.result(timeout=600) for future in loops]
    for kept, found in zip(expected, broken, strict=True):
        assert found["found"] == kept["found"]
        assert found["weights"] == kept["weights"]

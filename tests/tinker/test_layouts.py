"""Oracle: the same calls in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.errors import UserError
from luthier.tinker import AdamParams, LocalTrainingClient, LoraConfig, SamplingParams, adapter_state_dict
from tests.tinker.models import make_data
from tests.world import World

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp": (2, {"dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "dp x tp": (4, {"dp_shard": 2, "tp": 2}),
}
POLICY = {"logprobs": "logprobs", "advantages": "weights"}


def client_on(parallel: dict[str, int] | None, directory: Path) -> LocalTrainingClient:
    return LocalTrainingClient(
        "debug:llama",
        LoraConfig(rank=4, seed=3),
        parallel=parallel,
        precision="fp64",
        directory=directory,
        tokens_per_microbatch=32,
    )


def coupled(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    margins = torch.stack([logprobs[i].sum() - logprobs[i + 1].mean() for i in (0, 2)])
    return -torch.nn.functional.logsigmoid(0.1 * margins).sum(), {"rows": float(len(data))}


def scenario(parallel: dict[str, int] | None, directory: Path) -> dict[str, Any]:
    """What every kind of call tells, and the weights in the end."""
    client = client_on(parallel, directory)
    told: list[Any] = []

    def note(output: Any) -> None:
        rows = getattr(output, "loss_fn_outputs", [])
        told.append((output.metrics, [row["logprobs"].tolist() for row in rows]))

    def step() -> None:
        note(client.optim_step(AdamParams(learning_rate=1e-2, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)).result())

    weighted, short = make_data(weights="weights"), make_data(1, lengths=(7,))
    wide = make_data(2, weights="weights")
    for datum in wide:
        for key, offset in (("target_tokens", 1), ("weights", 0.5)):
            first = datum.loss_fn_inputs[key]
            second = (first + offset) % 60 if key == "target_tokens" else first * offset
            datum.loss_fn_inputs[key] = torch.stack([first, second], dim=1)  # type: ignore[index]
    note(client.forward_backward(weighted).result())
    step()
    note(client.forward(weighted).result())
    note(client.forward_backward(make_data(3, **POLICY), "ppo").result())
    note(client.forward_backward(make_data(4, **POLICY, sequence_ratio_mask="mask"), "gspo").result())
    note(client.forward_backward_custom(make_data(5)[:4], coupled).result())
    step()
    for call in (make_data(6), wide, short, make_data(7)[:2]):  # sums and means of one step, one row for two ranks
        note(client.forward_backward(call).result())
    step()
    path = client.save_state("kept").result().path
    note(client.forward_backward(weighted).result())
    step()
    client.load_state_with_optimizer(path).result()
    note(client.forward_backward(weighted).result())
    step()
    told.append(client.compute_logprobs([3, 14, 15, 9]).result())
    client.save_weights_for_sampler("s").result()
    for sampler in (client, client.create_sampling_client("s").result()):
        texts = sampler.sample([3, 14, 15, 9], 2, SamplingParams(max_tokens=4, seed=5, stop=[])).result().sequences
        told.append([(text.tokens, text.logprobs) for text in texts])
    return {
        "told": told,
        "weights": adapter_state_dict(client),
        "info": str(client.get_info()),
        "drawn": client.sample([3, 14, 15, 9], 1, SamplingParams(max_tokens=4, stop=[])).result().sequences[0].tokens,
    }


def flat(told: Any) -> list[Any]:
    """The numbers of nested lists and dicts."""
    if told is None:
        return []
    if isinstance(told, dict):
        return [number for key in sorted(told) for number in flat(told[key])]
    if isinstance(told, list | tuple):
        return [number for item in told for number in flat(item)]
    return [told]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return scenario(None, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_call_on_every_layout(
    name: str, world: Callable[[int], World], alone: dict[str, Any], tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS[name]
    found = world(ranks).run(scenario, layout, tmp_path)
    for one in found:
        assert one["told"] == found[0]["told"]
        assert one["info"] == alone["info"]
        assert one["drawn"] == found[0]["drawn"]
        assert one["weights"].keys() == alone["weights"].keys()
        for key, value in one["weights"].items():
            assert torch.allclose(value, alone["weights"][key], rtol=1e-10, atol=1e-10), key
    for ours, theirs in zip(flat(found[0]["told"]), flat(alone["told"]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10, abs=1e-10)


def refusals(directory: Path) -> list[str]:
    """What cannot be laid out, and what a model that trains whole on a layout cannot."""
    told = []
    sizes: dict[str, Any] = {"parallel": {"dp_shard": 2}, "precision": "fp64", "directory": directory}
    whole = LocalTrainingClient("debug:llama", **sizes)
    whole.forward_backward([3, 14, 15]).result()
    whole.optim_step().result()
    calls: list[Callable[[], Any]] = [
        lambda: whole.sample([3, 14]).result(),
        lambda: whole.save_weights_and_get_sampling_client(kind="inflight").result(),
        lambda: LocalTrainingClient(whole.model, **sizes),
        lambda: LocalTrainingClient("debug:gpt2", LoraConfig(rank=2), **sizes),
        lambda: LocalTrainingClient("debug:llama", parallel={"tp": 3}),
        lambda: LocalTrainingClient("debug:llama", parallel={"tpp": 2}),
    ]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_what_cannot_be_laid_out_is_named(world: Callable[[int], World], tmp_path: Path) -> None:
    for told in world(2).run(refusals, tmp_path):
        for sentence, part in zip(
            told,
            (
                "sampling: a model that trains whole on several ranks is on none of them whole; sample in one process",
                "kind: on several ranks texts are sampled from copies of the weights; use snapshot",
                "parallel: a model that is loaded already is whole in every process; name the model",
                "lora.train_attn: gpt2 makes queries, keys and values by one matrix",
                "parallel: tp 3 takes",
                "parallel.tpp: ",
            ),
            strict=True,
        ):
            assert part in sentence

"""Experts dealt to ranks, tokens travelling to them: gradients against one process of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LongcatFlashForCausalLM, Qwen3ForCausalLM

from luthier.batch import Batch
from luthier.hf.anatomy import describe
from luthier.hf.forward import hidden_states
from luthier.hf.head import head_logits
from luthier.hf.load import build_on_meta, load_model, model_class
from luthier.hf.source import resolve
from luthier.hf.tiny import debug_config
from luthier.parallel import expert, fsdp
from luthier.parallel.mesh import Layout, Mesh
from tests.oracles.plain import gradient_error
from tests.parallel import mixtures
from tests.world import World

Worlds = Callable[[int], World]


def load(path: Path, mesh: Mesh) -> nn.Module:
    """A model with its experts dealt out, and sharded."""

    def prepare(model: Any) -> None:
        experts = expert.shard(model, mesh)
        layers = [model.get_submodule(name) for name in describe(model).layers]
        assert mesh.fsdp is not None
        fsdp.shard(model, layers, mesh.fsdp, experts=experts, expert_mesh=mesh.efsdp)

    model = load_model(resolve(str(path)), dtype=torch.float64, prepare=prepare)

    return model.train()


def loss(model: Any, batch: Batch) -> torch.Tensor:
    """Sum of weighted cross-entropies of a packed row."""
    logits = head_logits(model, hidden_states(model, batch))
    return (F.cross_entropy(logits, batch.targets[0], reduction="none") * batch.weights[0]).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """What trains, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def trained(path: Path, layout: Layout, count: int) -> dict[str, torch.Tensor]:
    """On every rank: gradients of a global batch of `count` documents; rank 0 gives them back."""
    mesh = Mesh(layout, torch.device("cpu"))
    model = load(path, mesh)
    batch = mixtures.dealt(mixtures.samples(count), mesh.data_rank, mesh.data_ranks)
    for _ in range(2):  # a second microbatch must add, and what the first left must not matter
        fsdp.within(model, loss, model, batch.scaled(0.5)).backward()
    found = gradients(model)
    return found if dist.get_rank() == 0 else {}


def worst(world: World, path: Path, layout: Layout, count: int) -> float:
    """The largest error of a gradient against one process."""
    found = world.run(trained, path, layout, count)[0]
    return gradient_error(found, mixtures.reference(path, mixtures.samples(count)).gradients)


@pytest.mark.parametrize("kind", list(mixtures.KINDS))
def test_two_ranks_with_rows_of_their_own(world: Worlds, tmp_path: Path, kind: str) -> None:
    path = mixtures.save(kind, tmp_path / kind)
    assert worst(world(2), path, Layout(dp_shard=2, ep=2), 5) < mixtures.bound(kind)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", Layout(dp_shard=4, ep=4)),
        ("gpt_oss", Layout(dp_shard=4, ep=2)),
        ("deepseek_v3", Layout(dp_replicate=2, dp_shard=2, ep=2)),
    ],
    ids=str,
)
def test_four_ranks(world: Worlds, tmp_path: Path, kind: str, layout: Layout) -> None:
    path = mixtures.save(kind, tmp_path / kind)
    assert worst(world(4), path, layout, 9) < mixtures.bound(kind)


def test_a_rank_that_no_token_visits(world: Worlds, tmp_path: Path) -> None:
    path = mixtures.save("gpt_oss", tmp_path / "lonely")
    weights = load_file(path / "model.safetensors")
    for name, value in weights.items():
        if name.endswith("router.bias"):
            value.copy_(torch.tensor([50.0, 50.0, -50.0, -50.0]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert worst(world(2), path, Layout(dp_shard=2, ep=2), 5) < mixtures.bound("gpt_oss")


def meta(kind: str, **changes: Any) -> Any:
    config = mixtures.config(kind, **changes)
    return build_on_meta(model_class(resolve(f"debug:{kind}"), config), config)


def test_what_cannot_be_dealt_is_refused() -> None:
    assert expert.refusal(meta("mixtral"), 2) is None
    assert expert.refusal(meta("mixtral"), 3) == "its 4 experts cannot be dealt to 3 ranks evenly"
    assert expert.refusal(build_on_meta(Qwen3ForCausalLM, debug_config("qwen3")), 2) == "it has no experts"
    zero = build_on_meta(LongcatFlashForCausalLM, debug_config("longcat_flash"))
    assert "down_proj holds another number" in str(expert.refusal(zero, 2))

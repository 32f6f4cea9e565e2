"""Exports from any layout: the same files, to the bit, as one process writes; and adapters as PEFT reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from luthier.adapters import Merging, save_peft
from luthier.config import LoraConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.state import TrainState
from luthier.errors import ModelError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from tests.oracles.plain import save_strong
from tests.parallel.cases import ready, strengthen

LORA = LoraConfig(rank=4, target=["attn", "mlp"])
UNTYING = LoraConfig(rank=4, target=["attn", "unembed"])
WHOLE = LoraConfig(rank=4, target=["attn"], train_modules=["embed_tokens"])
HEAD = LoraConfig(rank=4, target=["attn"], train_modules=["lm_head"])
FSDP, TP_FSDP, PP_FSDP = {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}
EP = {"ep": 2, "dp_shard": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = {"qwen3": {}, "llama": {"tie_word_embeddings": True}, "gpt2": {}, "phi3": {}, "mixtral": {}, "gemma2": {}}
    return {kind: save_strong(debug_config(kind, **changes), root / kind) for kind, changes in kinds.items()}


def write(state: TrainState, directory: Path, shard_bytes: int) -> str:
    """Everything that can be written of a model; returns what merging says."""
    group = dist.group.WORLD if state.mesh is not None else None
    if state.lora is not None:
        strengthen(state)
        save_peft(state.model, directory / "peft", base_model="base", group=group)
    merging = Merging(state.model)
    save_model(
        state.model,
        directory / "model",
        tokenizer=None,
        transform=merging,
        shard_bytes=shard_bytes,
        card="# Mine\\n",
        group=group,
    )
    return str(merging.report(group))


def written(
    model: Path, layout: dict[str, int], directory: Path, lora: LoraConfig | None, precision: str, shard_bytes: int
) -> str:
    return write(ready(model, layout, precision=precision, adapter=lora), directory, shard_bytes)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


CASES = [
    ("qwen3", None, 4, [FSDP, TP_FSDP, PP_FSDP, {"dp_replicate": 2, "dp_shard": 2}]),
    ("llama", LORA, 4, [TP_FSDP, PP_FSDP]),
    ("llama", UNTYING, 4, [TP_FSDP, PP_FSDP]),
    ("llama", WHOLE, 4, [FSDP]),
    ("llama", HEAD, 4, [FSDP, TP_FSDP, PP_FSDP]),
    ("gpt2", LORA, 2, [{"dp_shard": 2}, {"pp": 2}]),
    ("phi3", LORA, 4, [TP_FSDP]),
    ("mixtral", None, 4, [EP, TP_FSDP, {"pp": 2, "ep": 2, "dp_shard": 2}]),
    ("gemma2", None, 2, [{"tp": 2}, {"pp": 2}]),
]


@pytest.mark.parametrize(("kind", "lora", "ranks", "layouts"), CASES)
def test_every_layout_writes_what_one_process_writes(
    world: Any,
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    lora: LoraConfig | None,
    ranks: int,
    layouts: list[dict[str, int]],
) -> None:
    precision = "bf16" if kind == "qwen3" else "fp32"
    alone = build_state(
        resolve(str(models[kind])),
        adapter=lora,
        optimizer=SGDConfig(name="sgd"),
        precision=precision,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )
    limit = 150_000
    said = write(alone, tmp_path / "alone", limit)
    expected = files(tmp_path / "alone")
    assert "model/model.safetensors.index.json" in expected, "several files, so several writers"
    for number, layout in enumerate(layouts):
        out = tmp_path / str(number)
        assert set(world(ranks).run(written, models[kind], layout, out, lora, precision, limit)) == {said}, layout
        assert sorted(path.name for path in out.iterdir()) == sorted(p.name for p in (tmp_path / "alone").iterdir())
        if "pp" not in layout:  # a stage begins a file of its own
            found = files(out)
            assert found.keys() == expected.keys(), layout
            assert [name for name in found if found[name] != expected[name]] == [], layout
            continue
        ours, theirs = tensors(out / "model"), tensors(tmp_path / "alone" / "model")
        assert ours.keys() == theirs.keys(), layout
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], layout
        index = json.loads((out / "model" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == ours.keys()
        assert index["metadata"] == json.loads(expected["model/model.safetensors.index.json"])["metadata"]
        for name in ("config.json", "generation_config.json", "README.md"):
            assert (out / "model" / name).read_bytes() == expected[f"model/{name}"], name
        if lora is not None:
            peft = files(out / "peft")
            assert peft == {k.removeprefix("peft/"): v for k, v in expected.items() if k.startswith("peft/")}, layout
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "0" / "model", output_loading_info=True)
    assert not any(info.values()), info


def refused(model: Path, directory: Path) -> str:
    """An export into a directory that holds something else, and one that breaks on one rank alone."""
    state = ready(model, {"dp_shard": 2}, precision="fp32")
    (directory / "mine").mkdir(exist_ok=True)
    (directory / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="no export"):
        save_model(state.model, directory / "mine", tokenizer=None, group=dist.group.WORLD)

    class Breaking:
        def sources(self, name: str) -> tuple[str, ...]:
            return (name, "model.norm.weight") if name.endswith("layers.1.mlp.up_proj.weight") else (name,)

        def shape(self, name: str, own: torch.Size) -> torch.Size:
            return own

        def keeps_tie(self, twin: str, owner: str) -> bool:
            return True

        def __call__(self, name: str, sources: Any) -> torch.Tensor:
            raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went") as caught:
        save_model(
            state.model,
            directory / "out",
            tokenizer=None,
            transform=Breaking(),
            shard_bytes=100_000,
            group=dist.group.WORLD,
        )
    return str(caught.value)


def test_what_fails_on_one_rank_is_told_on_all(world: Any, models: dict[str, Path], tmp_path: Path) -> None:
    said = world(2).run(refused, models["llama"], tmp_path)
    assert sorted(said, key=len)[0] == "the power went"
    assert sorted(said, key=len)[1].endswith("failed: RuntimeError: the power went")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

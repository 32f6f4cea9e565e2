"""The relatives of LoRA on layouts, against PEFT in one process: adapters from its files, gradients, what is saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from luthier.adapters import Merging, save_peft
from luthier.config import LoraConfig
from luthier.hf.debug.tiny import debug_config
from luthier.hf.save import save_model
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import Reference, gradient_error, plain_model, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import filed_reference, measure, ready, whole
from tests.soak import by_turns
from tests.world import RankError

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")]

LINEAR = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}, {"pp": 2}, {"cp": 2}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_strong(debug_config("llama", attention_bias=True, mlp_bias=True), root / "llama"),
        "gpt2": save_strong(debug_config("gpt2"), root / "gpt2"),
        "tied": save_strong(debug_config("llama", tie_word_embeddings=True), root / "tied"),
    }


def check(results: list[dict[str, Any]], expected: Reference) -> None:
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["validation"] == pytest.approx(expected.loss, rel=1e-10)
        assert result["norm"] == pytest.approx(norm, rel=1e-10)
        together |= result["gradients"]
    assert gradient_error(together, expected.gradients) < 1e-10


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_dora(world: Any, models: dict[str, Path], kind: str, layout: dict[str, int], tmp_path: Path) -> None:
    config = peft.LoraConfig(r=3, target_modules=LINEAR[kind], use_dora=True, fan_in_fan_out=kind == "gpt2")
    expected = filed_reference(models[kind], config, tmp_path)
    lora = LoraConfig(start_from=str(tmp_path))
    check(world(2).run(measure, models[kind], layout, documents(), lora=lora), expected)


@pytest.mark.parametrize(("kind", "layout", "dora"), by_turns(["llama", "tied", "gpt2"], LAYOUTS, "LoRA", "DoRA"))
def test_beside_the_table(
    world: Any, models: dict[str, Path], kind: str, layout: dict[str, int], dora: bool, tmp_path: Path
) -> None:
    names = ["wte", "c_attn"] if kind == "gpt2" else ["embed_tokens", "q_proj"]
    config = peft.LoraConfig(r=3, target_modules=names, use_dora=dora, fan_in_fan_out=kind == "gpt2")
    expected = filed_reference(models[kind], config, tmp_path)
    lora = LoraConfig(start_from=str(tmp_path))
    if "pp" in layout and kind != "llama":
        with pytest.raises(RankError, match="what is beside one of two tied ends is not dealt to stages"):
            world(2).run(measure, models[kind], layout, documents(), lora=lora)
        return
    check(world(2).run(measure, models[kind], layout, documents(), lora=lora), expected)


def exported(path: Path, layout: dict[str, int], directory: Path) -> None:
    """From a layout: PEFT's files, and the merged model."""
    state = ready(path, layout, adapter=LoraConfig(rank=4, target=["embed", "attn"]))
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if ".lora_A" in name:
                parameter.add_(0.1)
    group = torch.distributed.group.WORLD
    save_peft(state.model, directory / "adapter", group=group)
    save_model(state.model, directory / "merged", tokenizer=None, transform=Merging(state.model), group=group)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_a_table_is_merged_from_its_parts(
    world: Any, models: dict[str, Path], layout: dict[str, int], tmp_path: Path
) -> None:
    world(2).run(exported, models["tied"], layout, tmp_path)
    theirs = peft.PeftModel.from_pretrained(
        plain_model(models["tied"], torch.float64), str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    merged = plain_model(tmp_path / "merged", torch.float64)
    ids = torch.arange(4, 30)[None]
    expected = theirs(ids, use_cache=False).logits
    assert torch.allclose(merged(ids, use_cache=False).logits, expected, atol=1e-10)
    assert (plain_model(models["tied"], torch.float64)(ids, use_cache=False).logits - expected).abs().max() > 1e-2
    assert merged.lm_head.weight is not merged.model.embed_tokens.weight


def lengths(path: Path, layout: dict[str, int], precision: str) -> dict[str, torch.Tensor]:
    """On every rank: first lengths, whole; and the loss before the first step is the base's."""
    from luthier.engine.evaluate import evaluate
    from tests.parallel.cases import microbatches

    losses = []
    for dora in (True, False):
        state = ready(path, layout, precision=precision, adapter=LoraConfig(rank=4, target=["attn", "mlp"], dora=dora))
        assert state.mesh is not None
        batches = microbatches(documents(), state.mesh.data_rank, state.mesh.data_ranks)
        losses.append(evaluate(state, batches).loss)
        if dora:
            named = state.model.named_parameters()
            found = {name: whole(p.detach()) for name, p in named if "magnitude" in name}
    assert losses[0] == pytest.approx(losses[1], rel=1e-12 if precision == "fp64" else 1e-3)
    assert all(value.dtype == (torch.float64 if precision == "fp64" else torch.float32) for value in found.values())
    return found


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_first_lengths_are_the_norms(
    world: Any, models: dict[str, Path], layout: dict[str, int], precision: str
) -> None:
    from tests.oracles.plain import plain_model

    dtype = torch.float64 if precision == "fp64" else torch.bfloat16
    weights = plain_model(models["llama"], dtype).state_dict()
    for found in world(math.prod(layout.values())).run(lengths, models["llama"], layout, precision):
        assert found
        for name, value in found.items():
            expected = weights[name.replace("lora_magnitude_vector.", "")].to(value.dtype).norm(dim=1)
            assert torch.allclose(value, expected, rtol=1e-14 if precision == "fp64" else 1e-6, atol=0), name


def begun(path: Path, layout: dict[str, int], init: str, directory: Path) -> dict[str, torch.Tensor]:
    """On every rank: weights and adapters as they begin, whole, and after a change the files."""
    lora = LoraConfig(rank=4, target=["attn", "mlp"], init=init, dora=init == "pissa")
    state = ready(path, layout, precision="fp32", adapter=lora, seed=3)
    found = {name: whole(p.detach()).clone() for name, p in state.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            if ".lora_" in name:
                parameter.mul_(1.25)
    save_peft(state.model, directory, group=torch.distributed.group.WORLD)
    return found


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("kind", LINEAR)
def test_first_values_are_those_of_one_process(
    world: Any, models: dict[str, Path], kind: str, init: str, tmp_path: Path
) -> None:
    from luthier.adapters import adapted_layers, load_peft
    from luthier.engine.build import build_network
    from luthier.hf.source import resolve

    lora = LoraConfig(rank=4, target=["attn", "mlp"], init=init, dora=init == "pissa")
    how: Any = {"precision": "fp32", "device": torch.device("cpu")}
    one = build_network(resolve(str(models[kind])), adapter=lora, seed=3, **how).model
    expected = dict(one.named_parameters())
    layouts: list[dict[str, int]] = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}]
    if init == "pissa":
        layouts += [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}]
    for number, layout in enumerate(layouts):
        for found in world(math.prod(layout.values())).run(begun, models[kind], layout, init, tmp_path / str(number)):
            for name, value in found.items():
                exact = "magnitude" not in name
                assert torch.allclose(value, expected[name], rtol=0 if exact else 1e-6, atol=0), name
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if ".lora_" in name:
                parameter.mul_(1.25)
    ids = torch.arange(4, 30)[None]
    said = one(ids, use_cache=False).logits
    for number, _ in enumerate(layouts):
        model = build_network(resolve(str(models[kind])), adapter=None, **how).model
        load_peft(model, tmp_path / str(number))
        assert len(list(adapted_layers(model))) == len(list(adapted_layers(one)))
        assert torch.allclose(model(ids, use_cache=False).logits, said, rtol=1e-4, atol=1e-4)


def trained(path: Path, layout: dict[str, int]) -> tuple[float, torch.dtype]:
    """In bf16, whose lengths are in no group of FSDP's: they move together on all ranks."""
    result = measure(path, layout, documents(), lora=LoraConfig(rank=4, dora=True), precision="bf16")
    return result["norm"], next(g.dtype for name, g in result["gradients"].items() if "magnitude" in name)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_bf16_trains_lengths_in_float32(world: Any, models: dict[str, Path], layout: dict[str, int]) -> None:
    (norm, dtype), other = world(2).run(trained, models["llama"], layout)
    assert dtype == torch.float32
    assert (norm, dtype) == other
    assert norm == pytest.approx(trained_alone(models["llama"]), rel=0.03)


def trained_alone(path: Path) -> float:
    from luthier.config.sections import SGDConfig
    from luthier.engine.build import build_state
    from luthier.engine.step import forward_backward_all, optim_step
    from luthier.hf.source import resolve
    from tests.parallel.cases import microbatches, strengthen

    adapter = LoraConfig(rank=4, dora=True)
    optimizer = SGDConfig(name="sgd", learning_rate=0.1)
    state = build_state(
        resolve(str(path)), adapter=adapter, optimizer=optimizer, precision="fp64", device=torch.device("cpu")
    )
    strengthen(state)
    outputs = forward_backward_all(state, microbatches(documents(), 0, 1))
    return optim_step(state, loss=sum(float(output.loss) for output in outputs)).gradient_norm

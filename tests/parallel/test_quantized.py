"""A quantised base on layouts: each rank holds codes of its part, and the numbers are those of one process, exactly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from luthier.adapters import Merging
from luthier.config import LoraConfig
from luthier.engine.build import build_network
from luthier.engine.identity import model_digest
from luthier.engine.step import forward_backward_all
from luthier.errors import ConfigError
from luthier.hf import nf4
from luthier.hf.debug.tiny import debug_config
from luthier.hf.nf4 import Nf4Weight
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import Reference, gradient_error, save_strong
from tests.oracles.quantised import dequantised
from tests.oracles.rows import documents
from tests.parallel.cases import adapted_reference, measure, microbatches, ready, whole

pytestmark = list(PEFT_WARNINGS)

LAYOUTS: list[dict[str, int]] = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_replicate": 2, "dp_shard": 1}]
LORA = LoraConfig(rank=4, target=["attn", "mlp"], quantize="nf4")
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose matrices two ranks can share in whole blocks of 64."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return save_strong(debug_config("llama", layers=2, **sizes), tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def expected(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """PEFT beside plain weights that are those of the quantised ones, in one process."""
    one = build_network(resolve(str(base)), adapter=LORA, precision="fp64", device=torch.device("cpu")).model
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    values = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(nf4.dense(values[name]))
    dense = tmp_path_factory.mktemp("models") / "dense"
    plain.save_pretrained(dense)
    return adapted_reference(dense, MODULES)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_that_of_one_process(world: Any, base: Path, expected: Reference, layout: dict[str, int]) -> None:
    results = world(math.prod(layout.values())).run(measure, base, layout, documents(), lora=LORA)
    together: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert "NF4: 14 layers, 0.26x of bf16" in result["lora"]
        together |= result["gradients"]
    assert gradient_error(together, expected.gradients) < 1e-10


def test_tensors_and_rows_cut_together(world: Any, base: Path, expected: Reference) -> None:
    layout = {"tp": 2, "dp_shard": 2}
    for result in world(4).run(measure, base, layout, documents(), lora=LORA):
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        assert gradient_error(result["gradients"], expected.gradients) < 1e-10


def held(path: Path, layout: dict[str, int], target: Path) -> dict[str, Any]:
    """What a rank holds of the base, the digest of all, and an export."""
    state = ready(path, layout, precision="fp32", adapter=LORA)
    packed, plain = 0, 0
    for parameter in state.model.parameters():
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if isinstance(local, Nf4Weight):
            packed += local.stored
            plain += 2 * math.prod(parameter.shape)
    group = torch.distributed.group.WORLD
    digest = model_digest(state.model, group)
    save_model(state.model, target, tokenizer=None, transform=Merging(state.model), group=group)
    weight = whole_weight(state.model.get_parameter("model.layers.1.mlp.down_proj.weight"))
    return {"share": packed / plain, "digest": digest, "weight": weight}


def whole_weight(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        local = nf4.dense(parameter.to_local().detach())
        parameter = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
    return whole(nf4.dense(parameter).detach())


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_each_rank_holds_its_part_and_an_export_is_that_of_one_process(
    world: Any, base: Path, layout: dict[str, int], tmp_path: Path
) -> None:
    one = build_network(resolve(str(base)), adapter=LORA, precision="fp32", device=torch.device("cpu")).model
    save_model(one, tmp_path / "one", tokenizer=None, transform=Merging(one))
    weight = nf4.dense(one.get_parameter("model.layers.1.mlp.down_proj.weight"))
    for result in world(2).run(held, base, layout, tmp_path / "two"):
        assert result["share"] < 0.135  # of the whole in bf16
        assert result["digest"] == model_digest(one)
        assert torch.equal(result["weight"], weight)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def kept_by_fsdp(path: Path) -> set[str]:
    """Classes of what FSDP keeps of parts that are quantised, after a step."""
    state = ready(path, {"dp_shard": 2}, adapter=LORA)
    assert state.mesh is not None
    forward_backward_all(state, microbatches(documents(), state.mesh.data_rank, state.mesh.data_ranks))
    groups = [
        group
        for module in state.model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    packed = [p for p in parameters if isinstance(p._sharded_local_tensor, Nf4Weight)]
    return {type(p._sharded_param_data).__name__ for p in packed}


def test_no_rank_keeps_its_part_as_plain_numbers(world: Any, base: Path) -> None:
    assert world(2).run(kept_by_fsdp, base) == [{"Nf4Weight"}, {"Nf4Weight"}]


@pytest.mark.parametrize("layout", [*LAYOUTS, {"tp": 2, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize("double", [True, False])
def test_transposed_layers_are_quantised_along_their_inputs(
    world: Any, layout: dict[str, int], double: bool, tmp_path: Path
) -> None:
    path = save_strong(debug_config("gpt2", layers=2, n_embd=256), tmp_path / "base")
    dense = dequantised(path, tmp_path / "dense", double=double)
    expected = adapted_reference(dense, ["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    lora = LORA.model_copy(update={"double_quantize": double})
    together: dict[str, torch.Tensor] = {}
    for result in world(math.prod(layout.values())).run(measure, path, layout, documents(), lora=lora):
        assert result["loss"] == pytest.approx(expected.loss, rel=1e-10)
        together |= result["gradients"]
    assert gradient_error(together, expected.gradients) < 1e-10


def refused(layout: dict[str, int]) -> str:
    try:
        ready("debug:llama", layout, precision="fp32", adapter=LORA)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_layout_that_cuts_blocks_is_refused(world: Any) -> None:
    for said in world(2).run(refused, {"tp": 2}):
        assert (
            "o_proj.weight cannot be quantised on this layout: its rows of 64 numbers on 2 ranks are no whole" in said
        )


def loss_of(layout: dict[str, int], lora: LoraConfig) -> float:
    """Of the random debug model: nothing is read."""
    result = measure("debug:llama", layout, documents(), lora=lora)
    return float(result["loss"])


@pytest.mark.parametrize("double", [True, False])
def test_random_weights_are_quantised_as_in_one_process(world: Any, double: bool) -> None:
    lora = LORA.model_copy(update={"double_quantize": double})
    [two, _] = world(2).run(loss_of, {"dp_shard": 2}, lora)
    [one] = world(1).run(loss_of, {"dp_shard": 1}, lora)
    assert two == pytest.approx(one, rel=1e-10)

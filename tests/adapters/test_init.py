"""First values beside PEFT's, and what becomes of a base weight that gives a part of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pydantic import ValidationError

from luthier.adapters import LoraLayer, adapted_layers, apply_lora, load_peft, merge, save_peft
from luthier.adapters.disabled import without_adapters
from luthier.adapters.init import first_values, stream
from luthier.config import LoraConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.checkpoint import Checkpointer, committed
from luthier.engine.identity import model_digest
from luthier.engine.step import forward_backward_all, optim_step
from luthier.errors import ConfigError, ModelError
from luthier.hf.source import resolve
from tests.adapters.models import PEFT_WARNINGS, logits, loss, relative, tiny
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")]

TAKING = ["pissa", "pissa_niter_8", "olora"]
Q = "model.layers.0.self_attn.q_proj"


def trained(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """An adapted model after two steps."""
    model = tiny(kind, dtype)
    apply_lora(model, LoraConfig(**{"rank": 4, "alpha": 6, "target": ["attn", "mlp"], **options}), seed=3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_random_values_are_those_that_peft_draws(init: str) -> None:
    model = tiny("llama", torch.float32)
    before = logits(model)
    apply_lora(model, LoraConfig(rank=4, target=["q_proj"], init=init), seed=3)
    torch.manual_seed(stream(Q, 3).initial_seed())
    config = peft.LoraConfig(r=4, target_modules=[Q], init_lora_weights=False)
    theirs = peft.get_peft_model(tiny("llama", torch.float32), config)
    layer = theirs.base_model.model.model.layers[0].self_attn.q_proj
    torch.manual_seed(stream(Q, 3).initial_seed())
    if init == "orthogonal":
        layer.orthogonal_init("default")
    else:
        layer.reset_lora_parameters("default", init)
    ours = model.get_submodule(Q)
    assert torch.equal(ours.lora_A.weight, layer.lora_A.default.weight)
    assert torch.equal(ours.lora_B.weight, layer.lora_B.default.weight)
    assert relative(logits(model), before) < 1e-5
    if init == "gaussian":
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("init", TAKING)
@pytest.mark.parametrize("rslora", [False, True])
def test_parts_of_the_base_are_those_that_peft_takes(kind: str, init: str, rslora: bool) -> None:
    if (kind, init) == ("gpt2", "olora"):
        return  # PEFT takes the transposed weight as it lies, and makes matrices of the wrong shapes
    target = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}[kind]
    ours = tiny(kind, torch.float32)
    before = logits(ours)
    apply_lora(ours, LoraConfig(rank=4, alpha=6, target=target, init=init, rslora=rslora))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=target,
        init_lora_weights=False if "niter" in init else init,
        use_rslora=rslora,
        fan_in_fan_out=kind == "gpt2",
    )
    theirs = peft.get_peft_model(tiny(kind, torch.float32), config)
    bound = 2e-5
    for name, layer in adapted_layers(ours):
        other: Any = theirs.base_model.model.get_submodule(name)
        if "niter" in init:  # from the same random directions
            torch.manual_seed(int(torch.randint(2**62, (), generator=stream(name, 0))))
            other.pissa_init("default", init)
        product = other.lora_B.default.weight @ other.lora_A.default.weight
        assert relative(layer.lora_B.weight @ layer.lora_A.weight, product) < bound, name
        assert relative(layer.weight, other.base_layer.weight) < bound, name
    assert relative(logits(ours), before) < 2e-5
    assert relative(logits(ours), logits(theirs)) < 2e-5


@pytest.mark.parametrize("init", TAKING)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_is_taken_and_what_is_left_make_the_base(kind: str, init: str) -> None:
    model = tiny(kind)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = logits(model)
    apply_lora(model, LoraConfig(rank=4, target=["attn", "mlp"], init=init))
    assert relative(logits(model), before) < 1e-12
    for name, layer in adapted_layers(model):
        assert isinstance(layer, LoraLayer)
        product = layer.lora_B.weight @ layer.lora_A.weight * layer.lora_spec.scale
        whole = layer.weight + (product.t() if layer.lora_shape.transposed else product)
        assert relative(whole, weights[f"{name}.weight"]) < 1e-14
        if init == "pissa":
            left = torch.linalg.svdvals(layer.weight)
            assert torch.allclose(left[:-4], torch.linalg.svdvals(weights[f"{name}.weight"])[4:], atol=1e-12)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("kind", "init", "rslora"), [
    ("llama", "pissa", False), ("llama", "olora", True), ("gpt2", "pissa_niter_4", False)
])  # fmt: skip
def test_files_are_for_the_base_as_it_was(kind: str, init: str, rslora: bool, dora: bool, tmp_path: Path) -> None:
    ours = trained(kind, init=init, rslora=rslora, dora=dora)
    assert relative(logits(ours), logits(tiny(kind))) > 1e-3
    save_peft(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny(kind), str(tmp_path), autocast_adapter_dtype=False)
    assert relative(logits(theirs), logits(ours)) < 1e-12
    assert next(iter(theirs.peft_config.values())).r == 8
    again = tiny(kind)
    load_peft(again, tmp_path)
    assert relative(logits(again), logits(ours)) < 1e-12
    expected = logits(ours)
    merge(ours)
    assert relative(logits(ours), expected) < 1e-12


@pytest.mark.filterwarnings("ignore:.* changes the base weights of the model:UserWarning")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_peft_has_converted_is_read(init: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(tiny("llama", torch.float32), config)
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's guide has it
    theirs.save_pretrained(str(tmp_path / "first"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.5)
    theirs.peft_config["default"].init_lora_weights = init
    theirs.save_pretrained(str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=rf"its initialisation \('{init}'\) changed the base weights; convert it"):
        load_peft(tiny("llama", torch.float32), tmp_path / "taken")
    theirs.save_pretrained(
        str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "first")
    )
    ours = tiny("llama", torch.float32)
    load_peft(ours, tmp_path / "converted")
    assert relative(logits(ours), logits(theirs)) < 1e-5


@pytest.mark.parametrize("init", ["orthogonal", *TAKING])
def test_a_run_that_goes_on_has_the_very_same_base(init: str, tmp_path: Path) -> None:
    tiny("llama", torch.bfloat16).save_pretrained(tmp_path / "model")

    def ready(threads: int) -> Any:
        torch.set_num_threads(threads)
        return build_state(
            resolve(str(tmp_path / "model")),
            adapter=LoraConfig(rank=4, init=init),
            optimizer=SGDConfig(name="sgd", learning_rate=0.1),
            precision="bf16",
            device=torch.device("cpu"),
            seed=3,
        )

    def step(state: Any) -> None:
        rows = documents(lengths=[9, 12, 7])
        for sample in rows:
            sample.tokens[:] %= 67
            sample.targets[:] %= 67
        outputs = forward_backward_all(state, microbatches(rows, 0, 1))
        optim_step(state, loss=sum(float(output.loss) for output in outputs))

    one = ready(1)
    digest = model_digest(one.model)
    step(one)
    writer = Checkpointer(tmp_path / "checkpoints", trainable_only=True)
    writer.save(one, {"note": "kept"})
    writer.wait()
    other = ready(2)
    assert model_digest(other.model) == digest
    checkpoint = committed(tmp_path / "checkpoints")[-1]
    Checkpointer(tmp_path / "checkpoints", trainable_only=True).load(other, checkpoint)
    torch.set_num_threads(1)
    for state in (one, other):
        step(state)
    values = dict(other.model.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in one.model.named_parameters())


@pytest.mark.parametrize("options", [{"init": "pissa"}, {"init": "olora", "dora": True}, {"dora": True}], ids=str)
def test_without_its_adapter_a_model_is_its_base(options: dict[str, Any]) -> None:
    model = trained("llama", **options)
    before, base = logits(model), logits(tiny("llama"))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert relative(before, base) > 1e-3
    with without_adapters(model):
        assert relative(logits(model), base) < 1e-12
    assert torch.equal(logits(model), before)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("llama-tied", {"init": "pissa", "target": ["unembed"]}, "takes a part out of lm_head, and its weight is the"),
        ("mixtral", {"init": "olora"}, "olora is for linear layers, and model.layers.0.mlp.experts.gate_up_proj is"),
        ("mixtral", {"init": "orthogonal"}, "orthogonal is for linear layers"),
        ("llama", {"init": "pissa", "rank": 30}, "has no 30 directions to take, but"),
    ],
)
def test_what_cannot_begin_so_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        apply_lora(tiny(kind, torch.float32), LoraConfig(**options))


def test_the_config_knows_the_ways_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="init 'pisa' is not default"):
        LoraConfig(init="pisa")
    with pytest.raises(ValidationError, match="init orthogonal needs an even rank, not 3"):
        LoraConfig(init="orthogonal", rank=3)
    save_peft(trained("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"adapter\.init: pissa is asked for, and the adapter in"):
        apply_lora(tiny("llama"), LoraConfig(start_from=str(tmp_path), init="pissa"))


def test_gaussian_values_of_experts_have_their_deviation() -> None:
    model = tiny("mixtral", torch.float32)
    apply_lora(model, LoraConfig(rank=4, target=["experts"], init="gaussian"))
    adapter = model.model.layers[0].mlp.experts.lora["gate_up_proj"]
    down, up = first_values("model.layers.0.mlp.experts.gate_up_proj", adapter, 0, "gaussian")
    assert torch.equal(adapter.lora_A.weight, down)
    assert up is None
    assert abs(float(down.std()) * 4 - 1) < 0.2

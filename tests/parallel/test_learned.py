"""What learns in the place of text, on layouts: as PEFT has it in one process, and in files as one writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from luthier.adapters import adapter_of_files, apply_adapter, save_peft
from luthier.config import AdaptionPromptConfig, PrefixConfig, PromptConfig
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.rows.attention import register_attention
from tests.adapters.models import PEFT_WARNINGS
from tests.oracles.plain import gradient_error, plain_model, save_strong
from tests.oracles.rows import documents
from tests.parallel.cases import measure, ready, whole

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

PROMPT = PromptConfig(kind="prompt", num_virtual_tokens=5)
PREFIX = PrefixConfig(kind="prefix", num_virtual_tokens=5)
ADAPTION = AdaptionPromptConfig(kind="adaption_prompt", adapter_len=4, adapter_layers=2)
NETWORK = PrefixConfig(kind="prefix", num_virtual_tokens=5, projection=True)
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"dp_shard": 2}, {"tp": 2, "dp_shard": 2}]
CASES = [
    *((config, layout) for config in (PROMPT, PREFIX, ADAPTION) for layout in LAYOUTS),
    *((config, {"tp": 2, "sequence_parallel": True}) for config in (PROMPT, PREFIX, ADAPTION)),
    (ADAPTION, {"cp": 2}),
    (NETWORK, {"dp_shard": 2}),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = debug_config("llama", layers=3, tie_word_embeddings=True)
    return save_strong(config, tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def files(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of each kind, gates open."""
    found = {}
    for config in (PROMPT, PREFIX, ADAPTION):
        model = plain_model(path, torch.float64)
        model.set_attn_implementation(register_attention())
        apply_adapter(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".gate"):
                    parameter.fill_(0.75)
                elif parameter.requires_grad:
                    parameter.copy_(parameter.float())  # which PEFT keeps
        found[config.kind] = save_peft(model, tmp_path_factory.mktemp("adapters") / config.kind)
    return found


def reference(path: Path, directory: Path, before: int) -> tuple[float, dict[str, torch.Tensor]]:
    """PEFT's loss of `documents()`, each alone, and its gradients under the keys of its file."""
    model = peft.PeftModel.from_pretrained(plain_model(path, torch.float64), str(directory)).eval().double()
    samples = documents()
    total = sum(float(sample.weights.sum()) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adaption_" in name or "prompt_encoder" in name)
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, before:]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(sample.targets), reduction="none")
        loss = loss + (losses * torch.from_numpy(sample.weights).double()).sum() / total
    loss.backward()
    gradients = {
        name if "adaption_" in name else "prompt_embeddings": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradients


def as_filed(gradients: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Ours under the keys of PEFT's file."""
    if kind == "prompt":
        return {"prompt_embeddings": next(iter(gradients.values()))}
    if kind == "prefix":
        return {"prompt_embeddings": torch.cat([gradient.T for gradient in gradients.values()], 1)}
    return {
        f"base_model.model.{name.replace('.adaption.', '.adaption_')}": gradient[None] if "prompt" in name else gradient
        for name, gradient in gradients.items()
    }


@pytest.mark.parametrize(("config", "layout"), CASES, ids=str)
def test_a_step_is_that_of_peft(
    world: Any, path: Path, files: dict[str, Path], config: Any, layout: dict[str, int]
) -> None:
    adapter = adapter_of_files(files[config.kind]) if config is not NETWORK else config
    results = world(math.prod(int(degree) for degree in layout.values())).run(step, path, layout, adapter)
    # the one softmax that PEFT computes in float32
    bound = 5e-6 if config is ADAPTION else 1e-10
    if config is NETWORK:
        [single] = world(1).run(step, path, {}, adapter)
        loss, expected = single["loss"], single["gradients"]
    else:
        loss, expected = reference(path, files[config.kind], 5 if config is PROMPT else 0)
    for result in results:
        assert not result["missing"]
        assert result["loss"] == pytest.approx(loss, rel=bound)
        assert result["validation"] == pytest.approx(loss, rel=bound)
        found = result["gradients"] if config is NETWORK else as_filed(result["gradients"], config.kind)
        assert found.keys() == expected.keys()
        assert gradient_error(found, expected) < bound
        norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
        assert result["norm"] == pytest.approx(norm, rel=bound)


def step(path: Path, layout: dict[str, int], adapter: Any) -> dict[str, Any]:
    how = {name: value for name, value in layout.items() if name == "sequence_parallel"}
    degrees = {name: value for name, value in layout.items() if name not in how}
    return measure(path, degrees, documents(), lora=adapter, **how)


def written(path: Path, layout: dict[str, int], adapter: Any, directory: Path) -> dict[str, torch.Tensor]:
    state = ready(path, layout, adapter=adapter)
    save_peft(state.model, directory, group=torch.distributed.group.WORLD)
    return {name: whole(parameter.detach()) for name, parameter in state.trainable.items()}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("config", [PROMPT, PREFIX, ADAPTION], ids=lambda config: config.kind)
def test_first_values_and_files_are_those_of_one_process(
    world: Any, path: Path, tmp_path: Path, config: Any, layout: dict[str, int]
) -> None:
    [single] = world(1).run(written, path, {}, config, tmp_path / "one")
    for found in world(2).run(written, path, layout, config, tmp_path / "two"):
        assert found.keys() == single.keys()
        assert all(torch.equal(value, single[name]) for name, value in found.items())
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def refused(path: Path, layout: dict[str, int], adapter: Any) -> str:
    try:
        ready(path, layout, adapter=adapter)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "layout", "why"),
    [
        (PROMPT, {"pp": 2}, "adapters of kind prompt are not dealt to stages"),
        (PROMPT, {"cp": 2}, "virtual tokens stand before a row's documents"),
        (PREFIX, {"cp": 2}, "a prefix stands before a row's documents"),
        (NETWORK, {"tp": 2}, "makes all heads at once"),
        (ADAPTION, {"pp": 2}, "adapters of kind adaption_prompt are not dealt to stages"),
    ],
    ids=str,
)
def test_other_layouts_are_refused(world: Any, path: Path, config: Any, layout: dict[str, int], why: str) -> None:
    for said in world(2).run(refused, path, layout, config):
        assert why in said
        assert "would work" in said

"""What learns in the place of text: as PEFT has it, forward, backward and in files, for each document of a row."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

from luthier.adapters import Merging, adapter_of_files, apply_adapter, beside, is_adapter_weight, merge, save_peft
from luthier.adapters.disabled import without_adapters
from luthier.adapters.prompt import learned
from luthier.batch import Batch, Sample
from luthier.config import AdaptionPromptConfig, PrefixConfig, PromptConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.step import forward_backward_all
from luthier.errors import ConfigError, ModelError
from luthier.hf.forward import hidden_states, packing_is_exact
from luthier.hf.head import head_logits
from luthier.hf.load import load_model
from luthier.hf.rows.attention import register_attention
from luthier.hf.source import resolve
from tests.adapters.models import PEFT_WARNINGS, VOCABULARY, relative, tiny

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = PromptConfig(kind="prompt", num_virtual_tokens=5)
PREFIX = PrefixConfig(kind="prefix", num_virtual_tokens=5)
ADAPTION = AdaptionPromptConfig(kind="adaption_prompt", adapter_len=4, adapter_layers=2)
CASES = [
    *(pytest.param(kind, PROMPT, 1e-10, id=f"prompt-{kind}") for kind in ("llama", "qwen3-tied", "gpt2", "mixtral")),
    *(pytest.param(kind, PREFIX, 1e-10, id=f"prefix-{kind}") for kind in ("llama", "qwen3-tied", "gpt2", "mixtral")),
    pytest.param("plain-llama", ADAPTION, 1e-10, id="adaption-llama"),
    pytest.param("mistral", ADAPTION, 1e-10, id="adaption-mistral"),
]


@pytest.fixture(autouse=True)
def wide_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's softmax beside attention is of float32, whatever the model's numbers are; here it is of the model's."""
    wide = SimpleNamespace(softmax=lambda scores, dim, dtype: torch.softmax(scores, dim))
    monkeypatch.setattr(importlib.import_module("peft.tuners.adaption_prompt.layer"), "F", wide)


def model_of(kind: str) -> Any:
    if kind in ("plain-llama", "mistral"):
        config = LlamaConfig(**SIZES) if kind == "plain-llama" else MistralConfig(**SIZES, sliding_window=None)
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
        return model.eval()
    return tiny(kind)


def ours_of(kind: str, config: Any) -> Any:
    """A model with what learns in place, its values far from the first ones."""
    model = model_of(kind)
    model.set_attn_implementation(register_attention())
    apply_adapter(model, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in learned(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))  # as float32 has them, which PEFT keeps
    return model


def theirs_of(kind: str, directory: Path) -> Any:
    model = peft.PeftModel.from_pretrained(model_of(kind), str(directory), autocast_adapter_dtype=False).eval()
    model.double()
    for name, parameter in model.named_parameters():  # PEFT goes on training from no file of prompts by itself
        parameter.requires_grad_("adaption_" in name or "prompt_encoder" in name)
    return model


def samples() -> list[Sample]:
    random = np.random.default_rng(3)
    return [Sample.from_ids(random.integers(0, VOCABULARY, n + 1), np.ones(n + 1)) for n in (7, 1, 12, 4)]


def packed_loss(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, vocabulary] of a packed row, and the sum of their cross-entropies."""
    batch = Batch.pack(samples())
    logits = head_logits(model, hidden_states(model, batch))
    return logits, torch.nn.functional.cross_entropy(logits, batch.targets[0], reduction="sum")


def lonely_loss(model: Any, before: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of PEFT's model, each document by itself."""
    found, total = [], torch.zeros((), dtype=torch.float64)
    for sample in samples():
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None]).logits[0, before:]
        found.append(logits)
        targets = torch.from_numpy(sample.targets)
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return torch.cat(found), total


def gradients_as_filed(model: Any) -> dict[str, torch.Tensor]:
    """Gradients under the keys and in the form of PEFT's file."""
    with torch.no_grad():
        for parameter in learned(model).values():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    from luthier.adapters.learned_files import _tensors

    return _tensors(model)


@pytest.mark.parametrize(("kind", "config", "bound"), CASES)
def test_forward_and_gradients_are_those_of_peft(kind: str, config: Any, bound: float, tmp_path: Path) -> None:
    ours = ours_of(kind, config)
    save_peft(ours, tmp_path / "ours", base_model="the/base")
    theirs = theirs_of(kind, tmp_path / "ours")
    found, loss = packed_loss(ours)
    expected, their_loss = lonely_loss(theirs, 5 if config is PROMPT else 0)
    assert relative(found, expected) < bound
    loss.backward()
    their_loss.backward()
    assert all(is_adapter_weight(name) for name, parameter in ours.named_parameters() if parameter.requires_grad)
    gradients = gradients_as_filed(ours)
    expected_gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(gradients) == len(expected_gradients)
    for key, gradient in gradients.items():
        name = "prompt_encoder.default.embedding.weight" if key == "prompt_embeddings" else key
        assert relative(gradient, expected_gradients[name]) < bound, key


@pytest.mark.parametrize(("kind", "config", "bound"), CASES)
def test_files_go_both_ways(kind: str, config: Any, bound: float, tmp_path: Path) -> None:
    ours = ours_of(kind, config)
    save_peft(ours, tmp_path / "ours", base_model="the/base")
    theirs_of(kind, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert all(torch.equal(value.double(), other[key].double()) for key, value in one.items())
    theirs = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    written = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert {key: theirs[key] for key in written if key != "inference_mode"} == {
        key: value for key, value in written.items() if key != "inference_mode"
    }
    again = model_of(kind)
    again.set_attn_implementation(register_attention())
    apply_adapter(again, adapter_of_files(tmp_path / "theirs"))
    with torch.no_grad():
        assert torch.equal(packed_loss(again)[0], packed_loss(ours)[0])


def test_a_prefix_through_a_network_is_that_of_peft(tmp_path: Path) -> None:
    config = PrefixConfig(kind="prefix", num_virtual_tokens=5, projection=True, encoder_hidden_size=6)
    ours = ours_of("llama", config)
    with torch.no_grad():
        for parameter in learned(ours).values():
            parameter.mul_(0.5)
    wanted = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=6
    )
    theirs = peft.get_peft_model(tiny("llama"), wanted, autocast_adapter_dtype=False).eval().double()
    theirs.prompt_encoder.default.load_state_dict(
        {name.removeprefix("prompt_encoder."): value for name, value in learned(ours).items()}
    )
    found, loss = packed_loss(ours)
    expected, their_loss = lonely_loss(theirs)
    assert relative(found, expected) < 1e-10
    loss.backward()
    their_loss.backward()
    encoder = dict(theirs.prompt_encoder.default.named_parameters())
    for name, parameter in learned(ours).items():
        assert relative(parameter.grad, encoder[name.removeprefix("prompt_encoder.")].grad) < 1e-10, name
    # in files both are what the network has made
    save_peft(ours, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert relative(one["prompt_embeddings"], other["prompt_embeddings"]) < 1e-12
    again = tiny("llama")
    again.set_attn_implementation(register_attention())
    apply_adapter(again, adapter_of_files(tmp_path / "theirs"))
    with torch.no_grad():
        assert relative(packed_loss(again)[0], found) < 1e-12


def test_a_table_that_scales_its_rows_leaves_virtual_tokens_alone(tmp_path: Path) -> None:
    def gemma() -> Any:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, head_dim=8), dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
        return model.eval()

    ours = gemma()
    ours.set_attn_implementation(register_attention())
    apply_adapter(ours, PROMPT)
    save_peft(ours, tmp_path)
    theirs = peft.PeftModel.from_pretrained(gemma(), str(tmp_path), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        assert relative(packed_loss(ours)[0], lonely_loss(theirs, 5)[0]) < 1e-5  # its norms are of float32


@pytest.mark.parametrize("config", [PROMPT, PREFIX, ADAPTION], ids=lambda config: config.kind)
def test_first_values_and_what_is_beside(config: Any) -> None:
    model = model_of("plain-llama")
    model.set_attn_implementation(register_attention())
    expected = packed_loss(model)[0]
    report = apply_adapter(model, config)
    assert f"{sum(p.numel() for p in learned(model).values()):,} trainable of" in str(report)
    assert packing_is_exact(model) == (True, "")
    if config is ADAPTION:  # behind closed gates nothing is different yet
        assert torch.equal(packed_loss(model)[0], expected)
    else:
        assert relative(packed_loss(model)[0], expected) > 1e-2
    if config is PROMPT:
        table = model.get_input_embeddings().weight
        assert all((row == table).all(1).any() for row in model.get_input_embeddings().virtual_tokens.prompt)
    assert torch.equal(packed_loss(beside(model))[0], expected)
    with torch.no_grad():
        for parameter in learned(model).values():
            parameter.add_(0.5)
    assert relative(packed_loss(model)[0], expected) > 1e-2
    with without_adapters(model):
        assert torch.equal(packed_loss(model)[0], expected)
    assert relative(packed_loss(model)[0], expected) > 1e-2


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for config in (PROMPT, PREFIX, ADAPTION):
        model = model_of("plain-llama")
        model.set_attn_implementation(register_attention())
        apply_adapter(model, config)
        for way in (merge, Merging):
            with pytest.raises(ConfigError, match="cannot be merged into weights"):
                way(model)
    with pytest.raises(ConfigError, match="llama and mistral models, and Qwen3ForCausalLM is of type qwen3"):
        apply_adapter(tiny("qwen3"), ADAPTION)
    with pytest.raises(ConfigError, match="ends in a bias"):
        apply_adapter(tiny("llama"), ADAPTION)
    with pytest.raises(ConfigError, match="has 3 layers"):
        apply_adapter(model_of("mistral"), ADAPTION.model_copy(update={"adapter_layers": 4}))
    gemma = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, head_dim=8))
    with pytest.raises(ConfigError, match="do not attend to all that is before them"):
        apply_adapter(gemma, PREFIX)
    seeing = load_model(resolve("debug:llava"))
    with pytest.raises(ConfigError, match="lays pictures out among its tokens"):
        apply_adapter(seeing, PROMPT)
    save_peft(model, tmp_path)
    with pytest.raises(ConfigError, match="hold an adapter of kind adaption_prompt"):
        apply_adapter(tiny("llama"), PromptConfig(kind="prompt", start_from=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"adapter\.adapter_len.*7 is asked for.*has 4"):
        apply_adapter(
            model_of("plain-llama"),
            AdaptionPromptConfig(kind="adaption_prompt", adapter_len=7, start_from=str(tmp_path)),
        )
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="damaged"):
        apply_adapter(model_of("plain-llama"), adapter_of_files(tmp_path))


@pytest.mark.parametrize("network", [False, True], ids=["", "network"])
@pytest.mark.parametrize("config", [PROMPT, PREFIX, ADAPTION], ids=lambda config: config.kind)
def test_recomputed_layers_have_it_too(config: Any, network: bool) -> None:
    if network and config is not PREFIX:
        config = config.model_copy(update={"dtype": "bf16"})  # what learns may be of another dtype
    elif network:
        config = config.model_copy(update={"projection": True})
    found = []
    for policy in ("off", "full"):
        state = build_state(
            resolve("debug:llama"),
            adapter=config,
            optimizer=SGDConfig(name="sgd"),
            precision="fp32",
            device=torch.device("cpu"),
            activation_checkpointing=policy,
        )
        for name, parameter in state.trainable.items():
            if name.endswith(".gate"):
                parameter.data.fill_(0.5)
        assert not state.packing_fault
        rows = [Batch.pack(samples()), Batch.pack(samples()[:2])]  # one after the other, and then backward again
        forward_backward_all(state, rows)
        found.append({name: parameter.grad.clone() for name, parameter in state.trainable.items()})
    assert all(value.abs().max() > 0 for value in found[0].values())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())

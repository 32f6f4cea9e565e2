"""LoRA beside the table of tokens against PEFT's: outputs, gradients, files, merging, tied heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from luthier.adapters import adapted, apply_lora, beside, load_peft, merge, save_peft
from luthier.adapters.embedding import LoraEmbedding
from luthier.adapters.merge import Merging
from luthier.config import LoraConfig
from luthier.config.sections import AdamWConfig
from luthier.engine.build import build_network, build_state
from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.save import save_model
from luthier.hf.source import resolve
from luthier.sampling.engine import SamplingEngine
from luthier.sampling.request import SamplingRequest
from tests.adapters.models import PEFT_WARNINGS, disturb, logits, loss, relative, rows, tiny
from tests.adapters.test_gradients import plain

pytestmark = [
    *PEFT_WARNINGS,
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),
]
EMBEDDING = {"llama": "embed_tokens", "llama-tied": "embed_tokens", "gpt2": "wte", "gemma3_text": "embed_tokens"}


def model_of(kind: str) -> Any:
    if kind != "gemma3_text":
        return tiny(kind)
    torch.manual_seed(7)  # which multiplies its rows
    return AutoModelForCausalLM.from_config(debug_config(kind), dtype=torch.float64).eval()


def name_of(name: str) -> str:
    """Our name of one of PEFT's parameters."""
    short = plain(name)
    for side in "AB":
        if short.endswith(f"lora_embedding_{side}"):
            short = short.replace(f"lora_embedding_{side}", f"lora_{side}.weight")
    return short


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    ours = model_of(kind)
    query = "c_attn" if kind == "gpt2" else "q_proj"
    apply_lora(ours, LoraConfig(rank=4, alpha=6, target=["embed", query], **options))
    disturb(ours)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[EMBEDDING[kind], query],
        use_dora=options.get("dora", False),
        fan_in_fan_out=kind == "gpt2",
    )
    theirs = peft.get_peft_model(model_of(kind), config, autocast_adapter_dtype=False)
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[name_of(name)])
    return ours, theirs.eval()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name_of(name): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", list(EMBEDDING))
@pytest.mark.parametrize("dora", [False, True])
def test_outputs_and_gradients_equal_pefts(kind: str, dora: bool) -> None:
    if kind == "gemma3_text" and dora:
        return  # PEFT's DoRA leaves the multiplier of this table out
    ours, theirs = pair(kind, dora=dora)
    bound = 1e-6 if kind == "gemma3_text" else 1e-10
    assert relative(logits(ours), logits(theirs)) < bound
    left, right = gradients(ours), gradients(theirs)
    assert set(left) == set(right)
    assert any("embed" in name or "wte" in name for name in left)
    assert {name: worst for name in left if (worst := relative(left[name], right[name])) > bound} == {}


def test_a_row_that_pads_gets_no_gradient() -> None:
    ours = tiny("llama")
    ours.model.embed_tokens.padding_idx = int(rows()[0, 0])
    apply_lora(ours, LoraConfig(rank=4, target=["embed"]))
    disturb(ours)
    gradient = gradients(ours)["model.embed_tokens.lora_A.weight"]
    assert not gradient[:, int(rows()[0, 0])].any()
    assert gradient[:, int(rows()[0, 1])].any()


@pytest.mark.parametrize("kind", list(EMBEDDING))
@pytest.mark.parametrize("dora", [False, True])
def test_files_go_both_ways(kind: str, dora: bool, tmp_path: Path) -> None:
    ours, theirs = pair(kind, dora=dora)
    save_peft(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(model_of(kind), str(tmp_path / "ours"), autocast_adapter_dtype=False)
    if not (kind == "gemma3_text" and dora):
        assert relative(logits(again), logits(ours)) < (1e-6 if kind == "gemma3_text" else 1e-12)
    theirs.save_pretrained(str(tmp_path / "theirs"))  # with the table itself, as PEFT does by default
    model = model_of(kind)
    load_peft(model, tmp_path / "theirs")
    assert torch.equal(logits(model), logits(ours))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in ours.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("kind", list(EMBEDDING))
@pytest.mark.parametrize("dora", [False, True])
def test_merged_equals_adapted_and_a_tied_head_stays(kind: str, dora: bool, tmp_path: Path) -> None:
    ours, _ = pair(kind, dora=dora)
    tied = kind != "llama"
    head = ours.get_output_embeddings().weight.detach().clone()
    expected = logits(ours)
    (tmp_path / "export").mkdir()
    transform = Merging(ours)
    save_model(ours, tmp_path / "export", tokenizer=None, transform=transform)
    said = merge(ours)
    bound = 1e-6 if kind == "gemma3_text" else 1e-12
    assert relative(logits(ours), expected) < bound
    assert said.untied is tied
    assert said.layers == transform.report().layers
    assert torch.equal(ours.get_output_embeddings().weight, head)
    assert not list(adapted(ours))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert relative(logits(exported), expected) < bound
    assert transform.report().untied is tied


def test_before_its_first_step_it_changes_no_bit_and_a_twin_has_none() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny("llama-tied", dtype)
        before = logits(model)
        said = apply_lora(model, LoraConfig(rank=4, target=["embed", "attn"]))
        assert "targets=embed,attn" in str(said)
        assert torch.equal(logits(model), before)
        table = model.model.embed_tokens
        assert isinstance(table, LoraEmbedding)
        assert not table.lora_A.weight.any()
        assert table.lora_B.weight.any()
        disturb(model)
        assert not torch.equal(logits(model), before)
        twin = beside(model)
        assert torch.equal(logits(twin), before)
        assert type(twin.model.embed_tokens) is torch.nn.Embedding


def test_texts_are_those_of_the_merged_model() -> None:
    network = build_network(
        resolve("debug:llama"),
        adapter=LoraConfig(rank=4, target=["embed", "attn"]),
        precision="fp32",
        device=torch.device("cpu"),
    )
    disturb(network.model)
    requests = [
        SamplingRequest([5, 6, 7], 12, temperature=0, stop=[]),
        SamplingRequest([9], 12, temperature=0, stop=[]),
    ]
    adapted_texts = SamplingEngine(network.model.eval(), slots=2).sample(requests)
    merge(network.model)
    merged_texts = SamplingEngine(network.model, slots=2).sample(requests)
    for one, other in zip(adapted_texts, merged_texts, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-4, atol=1e-4)


def test_lora_plus_has_a_rate_for_tables() -> None:
    adapter = LoraConfig(rank=4, target=["embed", "q_proj"], learning_rate_ratio=4)
    state = build_state(
        resolve("debug:llama"),
        adapter=adapter,
        optimizer=AdamWConfig(learning_rate=1e-3),
        precision="fp32",
        device=torch.device("cpu"),
    )
    names = {id(p): name for name, p in state.model.named_parameters()}
    found = {names[id(p)]: group["initial_lr"] for group in state.optimizer.param_groups for p in group["params"]}
    assert {rate for name, rate in found.items() if "embed_tokens" in name} == {1e-6}
    assert {rate for name, rate in found.items() if "q_proj.lora_B" in name} == {4e-3}


def test_what_has_no_plain_table_is_refused() -> None:
    model = tiny("llama")
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ConfigError, match=r"adapter.target: model.embed_tokens is a Embedding, beside whose rows"):
        apply_lora(model, LoraConfig(target=["embed"]))

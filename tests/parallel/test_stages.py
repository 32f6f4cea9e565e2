"""Which models can be cut into stages, where, and why not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from luthier.errors import ConfigError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.load import build_on_meta
from luthier.parallel import rules
from luthier.parallel.balance import Part, balance
from luthier.parallel.cuttable import refusal, roles_of
from luthier.parallel.layout import Layout
from luthier.parallel.pipeline import cut
from luthier.parallel.programs import PROGRAMS, stages_of
from luthier.parallel.stages import costs, remove_others


def on_meta(kind: str, **changes: Any) -> Any:
    config = debug_config(kind, **changes)
    return build_on_meta(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "opt", "bloom", "falcon", "llama4_text", "recurrent_gemma", "jamba"])
def test_most_models_can_be_cut(kind: str) -> None:
    assert refusal(on_meta(kind, layers=4), 2) is None


def test_what_runs_when_is_seen_and_not_read_from_the_order_of_modules() -> None:
    roles = roles_of(on_meta("opt", layers=4))
    decoder = "model.decoder"  # declares its final norm before its layers
    assert roles.before == (f"{decoder}.embed_tokens", f"{decoder}.embed_positions")
    assert roles.layers == tuple(f"{decoder}.layers.{index}" for index in range(4))
    assert roles.after == (f"{decoder}.final_layer_norm", "lm_head")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma3n_text", "read per_layer_input beside the hidden states"),
        ("cpmant", "read position_bias beside the hidden states"),
        ("zamba2", "share weights"),
        ("xlm", "other modules with weights run between its layers"),
        ("zaya", "weights lie beside its layers"),
    ],
)
def test_models_whose_layers_share_more_are_refused(kind: str, reason: str) -> None:
    assert reason in str(refusal(on_meta(kind), 2))


def test_too_few_layers_are_refused() -> None:
    model = on_meta("llama", layers=4)
    assert refusal(model, 4) is None
    assert refusal(model, 4, 2) == "it has 4 layers for 8 stages"
    with pytest.raises(ConfigError) as refused:
        rules.check(model, Layout(pp=2), stages_per_rank=9)
    assert refused.value.where == "parallel.stages_per_rank"
    assert str(refused.value.remedy).startswith("2 of them, or dp_shard 2, would work")
    with pytest.raises(ConfigError, match="it has 4 layers for 8 stages; dp_shard 2 x pp 2 would work"):
        rules.check(model, Layout(pp=4), stages_per_rank=2)


def test_keys_and_values_of_other_layers_are_refused() -> None:
    model = on_meta("llama", layers=4)
    model.config.num_kv_shared_layers = 2
    assert refusal(model, 2) == "its last 2 layers read the keys and values of layers before them"


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    for stages in (2, 3, 4):
        layers = torch.randint(1, 9, (7,), generator=generator).tolist()
        parts = balance(layers, after=5.0, stages=stages)
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == 7

        def dearest(bounds: Any, layers: list[int] = layers) -> float:
            sums = [sum(layers[start:stop]) for start, stop in itertools.pairwise([0, *bounds, 7])]
            return max(*sums[:-1], sums[-1] + 5.0)

        least = min(dearest(bounds) for bounds in itertools.combinations(range(1, 7), stages - 1))
        assert dearest([part.stop for part in parts[:-1]]) == least


def test_a_large_head_makes_the_last_stage_short() -> None:
    model = on_meta("llama", layers=4, vocab_size=4096)
    parts = balance(*costs(model, roles_of(model)), stages=2)
    assert [(part.start, part.stop) for part in parts] == [(0, 3), (3, 4)]


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    model = on_meta("mixtral")
    layers, _ = costs(model, roles_of(model))
    layer = model.model.layers[0]
    experts = sum(p.numel() for p in layer.mlp.experts.parameters())
    whole = sum(p.numel() for p in layer.parameters())
    assert layers[0] == whole - experts * (1 - model.config.num_experts_per_tok / model.config.num_local_experts)


def test_no_name_moves() -> None:
    whole = on_meta("qwen3", layers=4, tie_word_embeddings=True)
    names = set(whole.state_dict())
    parts = [Part(index, 2, 2 * index, 2 * index + 2) for index in range(2)]
    found = []
    for part in parts:
        model = on_meta("qwen3", layers=4, tie_word_embeddings=True)
        remove_others(model, roles_of(whole), [part])
        found.append(set(model.state_dict()))
        assert len(model.model.layers) == 4
        assert bool(model.all_tied_weights_keys) == part.is_last
    assert found[0] | found[1] == names
    assert found[0] & found[1] == {"model.embed_tokens.weight"}


def test_schedules_say_how_many_stages_they_take() -> None:
    assert stages_of("interleaved_1f1b", 3) == 3
    assert stages_of("dualpipe_v", None) == 2
    with pytest.raises(ConfigError, match=r"1f1b has 1 stage a rank, not 2.*interleaved_1f1b"):
        stages_of("1f1b", 2)


def test_schedules_are_given_as_many_microbatches_as_they_need() -> None:
    for name, program in PROGRAMS.items():
        for given in range(1, 9):
            count = program.microbatches(given, 2, program.stages_per_rank)
            assert given <= count <= max(given + 1, 4), name


def test_compiled_layers_cannot_split_their_backward_pass() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    with pytest.raises(ConfigError, match=r"zero_bubble .* compiled layers both at once"):
        cut(on_meta("llama", layers=4), TwoRanks(), schedule="zero_bubble", compiled=True)  # type: ignore[arg-type]

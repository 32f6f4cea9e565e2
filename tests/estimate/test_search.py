"""Layouts found for models and clusters of whole halls, and what cannot be found."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from luthier.config import RunConfig
from luthier.errors import ConfigError
from luthier.estimate import estimate, find_layouts, lines
from luthier.estimate.cluster import find_cluster, this_machine
from luthier.estimate.memory import memory
from luthier.estimate.models import known
from luthier.estimate.plan import Plan
from luthier.estimate.prepare import find_model, prepare
from luthier.estimate.run import parse_layout
from luthier.estimate.search import CHECKPOINTING, layouts, search
from luthier.estimate.time import least_time, step_time
from luthier.hf.load import build_on_meta, model_class
from luthier.parallel.layout import Layout

PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
}
"""As the models' own pages count them."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_table_holds_the_sizes_of_well_known_models(name: str) -> None:
    source, config = find_model(name.partition("/")[2])
    assert source.repo == name
    model = build_on_meta(model_class(source, config), config)
    tied = set(model.all_tied_weights_keys)
    assert sum(p.numel() for key, p in model.named_parameters() if key not in tied) == PARAMETERS[name]


def test_other_models_are_what_they_are() -> None:
    assert find_model("debug:llama")[1] is None
    assert find_model("Qwen/Qwen3-0.6B", "v1")[1] is None
    assert len(known()) > 12


def found(model: str, gpus: int, **data: Any) -> dict[str, Any]:
    config = RunConfig.model_validate({"model": model, "data": {"sequence_length": 4096}} | data)
    return find_layouts(config, gpus)


@pytest.mark.parametrize(
    ("model", "gpus"), [("Qwen3-0.6B", 1), ("Llama-3.1-70B", 64), ("Qwen3-235B-A22B", 256)], ids=str
)
def test_layouts_are_ranked_with_the_terms_of_their_figures(model: str, gpus: int) -> None:
    result = found(model, gpus)
    entries = result["layouts"]
    assert entries[0]["tokens_per_second"] >= entries[-1]["tokens_per_second"]
    for entry in entries:
        assert Layout(**entry["degrees"]).ranks == gpus
        for terms in (entry["memory"], entry["time"]):
            assert terms["total"] == pytest.approx(sum(v for name, v in terms.items() if name != "total"))
        assert entry["memory"]["total"] <= 0.92 * find_cluster("h200").memory
        # useful operations over the peak of all, no more than what products may reach
        assert 0.05 < entry["mfu"] <= 0.7
    table = "\n".join(lines(result))
    assert entries[0]["layout"] in table


def test_what_is_passed_over_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def every(shape: Any, cluster: Any, ranks: int, **how: Any) -> Any:
        """All that fits, weighed one by one."""
        local = cluster.for_ranks(ranks)
        rates: dict[Layout, float] = {}
        for layout in layouts(shape, ranks, local.gpus_per_node, how["refusal"]):
            for rows in (1, 2, 4, 8):
                microbatches = round(how["step_tokens"] / (how["length"] * layout.data_ranks) / rows)
                if microbatches < layout.pp:
                    continue
                for checkpointing in CHECKPOINTING:
                    plan = Plan(layout, how["length"], rows, microbatches, checkpointing, reshard=layout.pp == 1)
                    if memory(shape, plan).total <= local.memory * local.memory_share:
                        rate = plan.step_tokens / step_time(shape, plan, local).total
                        rates[layout] = max(rate, rates.get(layout, 0.0))
        kept.extend(sorted(rates.values(), reverse=True)[:10])
        return search(shape, cluster, ranks, **how)

    monkeypatch.setattr("luthier.estimate.run.search", every)
    result = found("Qwen3-0.6B", 16)
    assert [entry["tokens_per_second"] for entry in result["layouts"]] == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize(("kind", "cluster"), [("mixtral", "h200"), ("qwen3", "h100")])
def test_no_step_is_faster_than_the_bound_that_a_search_sorts_by(kind: str, cluster: str) -> None:
    config = RunConfig.model_validate({"model": f"debug:{kind}", "data": {"sequence_length": 4096}})
    shape, machine = prepare(config, cpu=False).shape, find_cluster(cluster)
    admitted = {"tp": 2, "cp": 2, "pp": 2, "ep": 4}
    some = list(layouts(shape, 16, 8, lambda name, degree: None if degree <= admitted.get(name, 16) else "no"))
    assert {layout.ep for layout in some} == ({1, 2, 4} if kind == "mixtral" else {1})
    for layout, checkpointing in itertools.product(some, CHECKPOINTING):
        plan = Plan(layout, 4096, 2, 6, checkpointing, reshard=layout.pp == 1)
        time = step_time(shape, plan, machine)
        assert least_time(shape, plan, machine) <= time.total
        between = time.products + time.other + time.context + time.experts + time.bubble
        assert least_time(shape, plan, machine) >= 0.5 * between


def test_so_many_gpus_are_nowhere_and_so_few_tokens_no_step() -> None:
    with pytest.raises(ConfigError, match="100,000,000 GPUs"):
        found("Qwen3-0.6B", 10**8)
    with pytest.raises(ConfigError, match="a step of 4,096 tokens has too few documents of 4,096 for 256 GPUs"):
        found("debug:llama", 256, train={"tokens_per_step": 4096})
    assert found("debug:llama", 1, data={"sequence_length": 1001})["layouts"]


def test_adapters_need_less() -> None:
    full, lora = (found("Qwen3-0.6B", 1, **more)["layouts"][0] for more in ({}, {"adapter": {"kind": "lora"}}))
    assert lora["memory"]["optimizer"] < 0.05 * full["memory"]["optimizer"]
    assert lora["tokens_per_second"] > full["tokens_per_second"]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match=r"no layout fits in 128\.6 GiB: one process needs"):
        found("Llama-3.1-70B", 1)


@pytest.mark.parametrize("text", ["dp_shard 2 x tp 4", "dp_shard=2,tp=4", "tp 4, dp_shard 2"])
def test_layouts_are_written_as_they_are_said(text: str) -> None:
    base = RunConfig.model_validate({"model": "debug:llama", "data": {}}).parallel
    assert Layout.resolve(parse_layout(text, base), 8) == Layout(dp_shard=2, tp=4)
    for wrong, told in {
        "two by four": "is no layout",
        "tp 2 x tp 2": "has tp twice",
        "dp_shard 0": "has dp_shard 0",
        "tp -3": "has tp -3",
        "dp_shard 999999999999": "has dp_shard 999999999999",
    }.items():
        with pytest.raises(ConfigError, match=told):
            parse_layout(wrong, base)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": {"cpu_offload": True}},
        {"parallel": {"reshard": "never"}},
        {"optimizer": {"in_backward": True}, "train": {"max_gradient_norm": None}},
    ],
    ids=str,
)
def test_a_search_weighs_layouts_as_the_run_would_use_them(options: dict[str, Any]) -> None:
    train = {"precision": "bf16", "tokens_per_step": 4 * 256, **options.get("train", {})}  # a document for each rank
    fields = {"model": "debug:qwen3", "data": {"sequence_length": 256}, **options, "train": train}
    found = find_layouts(RunConfig.model_validate(fields), 4, "h100")["layouts"]
    asked = [entry for entry in found if entry["rows"] == 1]  # an estimate's microbatch is one document
    assert {entry["layout"] for entry in asked} >= {"dp_shard 4", "dp_replicate 4"}
    for entry in asked:
        train["activation_checkpointing"] = entry["activation_checkpointing"]
        config = RunConfig.model_validate(fields)
        parallel = parse_layout(entry["layout"], config.parallel)
        alone = estimate(config.model_copy(update={"parallel": parallel}), cluster="h100")
        assert entry["memory"]["total"] == alone["memory"]["total"]
        assert entry["time"]["total"] == pytest.approx(alone["time"]["total"])


def test_clusters_are_presets_files_and_this_machine(tmp_path: Path) -> None:
    assert find_cluster("h200", 4).gpus_per_node == 4
    here = this_machine()
    assert here.for_ranks(4).peak(4) == here.peak(4) / 4
    own = tmp_path / "own.yaml"
    fields = "gpus_per_node: 4\nmemory_gib: 40\nbf16_flops: 3.12e+14\nfp32_flops: 1.95e+13\nmemory_bandwidth: 1.5e+12\n"
    own.write_text(fields + "node_bandwidth: 3.0e+11\nnetwork_bandwidth: 2.5e+10\n", encoding="utf-8")
    assert find_cluster(str(own)).memory == 40 * 2**30
    for absurd in ("memory_gib: .inf", "bf16_flops: .nan", "node_bandwidth: 1.0e-300", "launch_seconds: .inf"):
        own.write_text(fields + f"node_bandwidth: 3.0e+11\nnetwork_bandwidth: 2.5e+10\n{absurd}\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=absurd.partition(":")[0]):
            find_cluster(str(own))
    own.write_text("gpus_per_node: none\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="gpus_per_node"):
        find_cluster(str(own))
    with pytest.raises(ConfigError, match="did you mean h200"):
        find_cluster("h20")

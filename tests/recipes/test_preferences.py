"""Preference runs: nothing depends on packing, a stopped run ends as an unbroken one, the reference is asked once, and
margins rise on pairs that were held out."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.batch import Batch
from luthier.config import RunConfig
from luthier.data.cache import cache_directory
from luthier.data.loader import Rows
from luthier.engine.step import ForwardBackward
from luthier.errors import CheckpointError, NonFiniteError, UserError
from luthier.hf.debug.tiny import debug_config
from luthier.recipes import dpo, kto, methods, pairs, references, setup
from luthier.recipes.dry_run import dry_run
from luthier.recipes.evaluate import evaluate
from luthier.recipes.loop import update
from luthier.recipes.run import opened
from tests.oracles.plain import gradient_error, save_strong
from tests.recipes.preferences import LABELLED, PAIRS, config_of, double, one_step, step_of
from tests.recipes.test_train import assert_same_end

METHODS: list[dict[str, Any]] = [
    {"name": "dpo", "cross_entropy": 0.3},
    {"name": "orpo", "train_on_prompt": True},
    {"name": "simpo"},
    {"name": "kto"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    return [save_strong(debug_config("gpt_neox"), place / str(seed), seed=seed) for seed in (0, 1)]


def rows_of(method: dict[str, Any]) -> list[dict[str, Any]]:
    return LABELLED if method["name"] == "kto" else PAIRS


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_microbatches_change_nothing(method: dict[str, Any], models: list[Path], tmp_path: Path) -> None:
    asked = method if method["name"] in ("orpo", "simpo") else method | {"reference": str(models[1])}
    config = config_of(models[0], rows_of(method), tmp_path, asked)
    with double():
        whole = one_step(config, [list(range(8))])
        apart = one_step(config, [[5, 0], [3], [1, 2, 7], [4, 6]])
        alone = one_step(config.model_copy(update={"method": unshared(config)}), [[number] for number in range(8)])
    for measured, gradients in (apart, alone):
        assert measured == pytest.approx(whole[0], rel=1e-10)
        assert gradient_error(gradients, whole[1]) < 1e-10


def test_a_model_that_reads_one_document_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it learns from documents alone is what another learns from packed ones."""
    config = config_of(save_strong(debug_config("gpt_neox"), tmp_path / "neox"), PAIRS, tmp_path, "orpo")
    microbatches = [[number] for number in range(4)]
    with double():
        expected = one_step(config, microbatches)
        own = setup.build_state

        def faulty(*args: Any, **how: Any) -> Any:
            state = own(*args, **how)
            state.packing_fault = "of a test"
            return state

        with monkeypatch.context() as patched:  # undone before `double` is, or float64 would stay for later tests
            patched.setattr(setup, "build_state", faulty)
            found = one_step(config, microbatches)
    assert found[0] == pytest.approx(expected[0], rel=1e-10)
    assert gradient_error(found[1], expected[1]) < 1e-10
    mamba = config_of("debug:mamba", PAIRS, tmp_path, "dpo", train={"steps": 2, "rows_per_step": 2})
    assert methods.train(mamba)["steps"] == 2


def test_kto_names_the_row_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("debug:llama", LABELLED, tmp_path, "kto")
    own = kto.forward_backward_all

    def poisoned(state: Any, batches: Sequence[Batch], loss: Any) -> list[ForwardBackward]:
        [output], [batch] = own(state, batches, loss), batches
        [fourth] = [place for place, origin in enumerate(batch.origins) if origin.endswith("jsonl:4")]
        output.logprobs[slice(*batch.cu_seqlens[fourth : fourth + 2].tolist())] = math.nan
        return [ForwardBackward(output.loss * math.nan, output.logprobs)]

    monkeypatch.setattr(kto, "forward_backward_all", poisoned)
    with opened(config, "never") as run, pytest.raises(NonFiniteError, match=r"in rows \S+rows\.jsonl:4;"):
        kto.take_step(run, step_of(run, [range(6)]))


def unshared(config: RunConfig) -> Any:
    change = {"share_prompt": False} if hasattr(config.method, "share_prompt") else {}
    return config.method.model_copy(update=change)


def test_the_reference_of_a_step_is_the_model_before_training(tmp_path: Path) -> None:
    """precomputed and base: the same numbers, and the first loss is log 2."""
    found = {}
    for reference in ("precomputed", "base"):
        adapter = {"rank": 4, "train_modules": ["lm_head"]}
        method = {"name": "dpo", "reference": reference}
        (tmp_path / reference).mkdir()
        config = config_of("debug:llama", PAIRS, tmp_path / reference, method)
        config = RunConfig.model_validate(
            config.model_dump(mode="json")
            | {"adapter": adapter, "train": {"steps": 4, "rows_per_step": 3, "precision": "fp32"}}
            | {"optimizer": {"learning_rate": 1e-2}}
        )
        methods.train(config)
        lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
        found[reference] = [json.loads(line)["loss"] for line in lines]
    assert found["precomputed"][0] == pytest.approx(0.693147, abs=1e-5)
    assert found["precomputed"][-1] < 0.6
    assert found["base"] == pytest.approx(found["precomputed"], rel=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "dpo": {"adapter": {"rank": 4, "dropout": 0.1}},
    "dpo of all weights": {},
    "dpo of all weights, no cache": {"data": {"cache": False}},
    "dpo against a copy": {"method": {"name": "dpo", "reference": "base"}, "adapter": {"rank": 4}},
    "kto": {"method": {"name": "kto"}, "adapter": {"rank": 4}},
    "orpo": {"method": "orpo", "adapter": {"rank": 4}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    asked = {"method": "dpo", **CASES[case]}
    method = asked["method"]
    rows = LABELLED if case == "kto" else PAIRS

    def config(name: str) -> RunConfig:
        (tmp_path / name).mkdir(exist_ok=True)
        base = config_of("debug:llama", rows, tmp_path / name, method).model_dump(mode="json")
        base["data"] |= {"validation_fraction": 0.2, **asked.get("data", {})}
        train = {"epochs": 2, "rows_per_step": 3, "precision": "fp32"}
        more = {"train": train, "evaluation": {"every": 2}, "adapter": asked.get("adapter")}
        return RunConfig.model_validate(base | more | {"optimizer": {"learning_rate": 1e-2}})

    whole = methods.train(config("whole"))
    stop_at = {2, 3}

    def stopping(run: Any, batch: Any, outputs: Any) -> dict[str, float]:
        measured = update(run, batch, outputs)
        if run.state.counters.step in stop_at:
            stop_at.discard(run.state.counters.step)
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(pairs, "update", stopping)
    monkeypatch.setattr(kto, "update", stopping)
    broken = config("broken")
    assert methods.train(broken)["interrupted"] == "SIGTERM"
    assert methods.train(broken)["steps"] == 3
    assert methods.train(broken, resume="must")["steps"] == whole["steps"]
    assert_same_end(Path(config("whole").output), Path(broken.output))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            {"name": "dpo", "reference": "debug:gpt2", "beta": 0.9},
            "method.beta was 0.1 and is 0.9, method.reference was 'precomputed' and is 'debug:gpt2'; undo the change",
        ),
        ({"name": "dpo", "loss": "ipo"}, "method.loss was 'sigmoid' and is 'ipo'; undo the change"),
        ({"name": "orpo"}, "cannot go on from this checkpoint: method was 'dpo' and is 'orpo'; undo the change"),
    ],
    ids=str,
)
def test_another_loss_is_not_gone_on_with(tmp_path: Path, method: dict[str, Any], told: str) -> None:
    def config(method: Any, steps: int) -> RunConfig:
        train = {"steps": steps, "rows_per_step": 2, "precision": "fp32"}
        return config_of("debug:llama", PAIRS, tmp_path, method, train=train)

    methods.train(config("dpo", 1))
    with pytest.raises(CheckpointError) as caught:
        methods.train(config(method, 2))
    assert told in str(caught.value)
    assert methods.train(config({"name": "dpo", "share_prompt": False}, 2), resume="must")["steps"] == 2


def test_the_reference_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = references.sums_of

    def counted(network: Any, rows: Any, numbers: Any, **how: Any) -> Any:
        asked.append(len(numbers))
        return own(network, rows, numbers, **how)

    monkeypatch.setattr(references, "sums_of", counted)
    config = config_of(
        "debug:llama", PAIRS, tmp_path, "dpo", train={"steps": 2, "rows_per_step": 3, "precision": "fp32"}
    )
    methods.train(config)
    assert asked == [6]  # the rows of two steps, of ten
    more = config.model_copy(update={"output": tmp_path / "other"})
    more.method.beta = 0.5  # type: ignore[union-attr]
    methods.train(more)
    assert asked == [6]
    longer = config_of("debug:llama", PAIRS, tmp_path, "dpo", output=str(tmp_path / "third"))
    methods.train(longer)
    assert asked == [6, 4]
    [kept] = (cache_directory() / "reference").iterdir()
    kept.write_bytes(kept.read_bytes()[:40])
    methods.train(longer, resume="never")
    assert asked == [6, 4, 10]


@pytest.mark.parametrize(
    "adapter",
    [
        {"init": "pissa"},
        {"init": "olora", "dora": True},
        {"init": "pissa", "train_modules": ["norm"]},
        {"init": "orthogonal"},
        {"start_from": "START", "dtype": "fp32"},
    ],
    ids=str,
)
def test_rows_that_are_asked_about_later_have_the_same_reference(adapter: dict[str, Any], tmp_path: Path) -> None:
    """In bfloat16, where taking a part out of a weight and putting it beside it moves what the model says."""
    how = {"train": {"rows_per_step": 6, "steps": 1, "precision": "bf16"}, "optimizer": {"learning_rate": 0.1}}
    if "start_from" in adapter:
        methods.train(config_of("debug:llama", PAIRS, tmp_path, "orpo", adapter={"rank": 4, "dtype": "fp32"}, **how))
        how |= {"output": str(tmp_path / "second")}
        adapter = adapter | {"start_from": str(tmp_path / "run" / "export")}
    else:
        adapter = adapter | {"rank": 4}
    config = config_of("debug:llama", PAIRS, tmp_path, "dpo", adapter=adapter, **how)
    some = tmp_path / "some.jsonl"
    some.write_text("".join(json.dumps(row) + "\n" for row in PAIRS[4:]))
    data = {"train": str(some), "validation": str(tmp_path / "rows.jsonl"), "packing": False, "cache": False}
    with opened(RunConfig.model_validate(config.model_dump(mode="json") | {"data": data}), "auto") as run:
        assert isinstance(run.rows, Rows)
        batches = references.with_reference(run, [Batch.pack([run.rows[number]]) for number in range(6)])
        for batch in run.loader:
            assert dpo.recipe.take_step(run, batch)["gradient_norm"] > 0
        later = references.held_out_reference(run)
    assert [batch.inputs["reference"].tolist() for batch in batches] == later[4:].tolist()


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_reference_that_is_not_finite(
    method: str, part: str, answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the row, and is asked again by the next run."""
    config = config_of("debug:llama", rows_of({"name": method}), tmp_path, method)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join((tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)[1:]))
    data = config.data.model_dump() | {"validation": str(tmp_path / "rows.jsonl"), part: str(bad), "cache": False}
    config = RunConfig.model_validate(config.model_dump(mode="json") | {"data": data})
    own = references.logprobs

    def poisoned(network: Any, batches: Sequence[Batch], share_prefixes: bool) -> list[torch.Tensor]:
        found = own(network, batches, share_prefixes)
        for batch, values in zip(batches, found, strict=True):
            document = 0
            for row in batch.rows:
                if row.number == 2 and batch.origins[document] == f"{bad}:3":
                    values[slice(*batch.cu_seqlens[document + answer : document + answer + 2].tolist())] = math.nan
                document += row.documents
        return found

    monkeypatch.setattr(references, "logprobs", poisoned)
    with pytest.raises(NonFiniteError, match=r"not finite, in rows \S+bad\.jsonl:3;"):
        methods.train(config)
    monkeypatch.setattr(references, "logprobs", own)
    assert methods.train(config, resume="never")["steps"] == 1


@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "kto"])
def test_examples_move_the_margin_of_held_out_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.config import load_config

    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    config = load_config(root / "examples" / f"{name}.yaml", [f"output={tmp_path / 'run'}"])
    summary = methods.train(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "validation_loss" in line]
    assert measured[-1]["validation_loss"] < measured[0]["validation_loss"]
    assert measured[-1]["validation_reward_margin"] > measured[0]["validation_reward_margin"]
    if name != "kto":
        assert measured[-1]["validation_reward_accuracy"] == 1.0
    assert summary["validation"]["loss"] == measured[-1]["validation_loss"]
    assert (tmp_path / "run" / "export" / "adapter_config.json").is_file()


def test_a_dry_run_takes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    references_of = references.references

    def counting(run: Any, rows: Any, numbers: Any) -> Any:
        asked.append(len(numbers))
        return references_of(run, rows, numbers)

    monkeypatch.setattr(references, "references", counting)
    config = config_of("debug:llama", PAIRS, tmp_path, "dpo", train={"epochs": 2, "rows_per_step": 2})
    assert dry_run(config)["losses"][0] == pytest.approx(0.693147, abs=1e-5)
    assert asked == [4]  # of the rows of two steps, not of all
    assert len(PAIRS) > 4


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    def refused(words: str, **changes: Any) -> None:
        with pytest.raises((UserError, ValueError), match=words):
            methods.train(config_of("debug:llama", PAIRS, tmp_path, **changes))

    refused("needs method.reference: base", method="dpo", data={"streaming": True, "train": "x"}, train={"steps": 1})
    refused("hinge has no label smoothing", method={"name": "dpo", "loss": "hinge", "label_smoothing": 0.1})
    refused("no format fits the columns.*method: dpo", method="sft")
    with pytest.raises(UserError, match="the rows of method dpo are pairs"):
        evaluate(config_of("debug:llama", PAIRS, tmp_path, "dpo"))
    rows = str(tmp_path / "rows.jsonl")
    refused("gives documents, and the method", method="dpo", data={"train": {"path": rows, "format": "text"}})


def test_streaming_pairs_have_a_reference_in_every_step(tmp_path: Path) -> None:
    config = config_of("debug:llama", PAIRS, tmp_path, {"name": "dpo", "reference": "base"})
    values = config.model_dump(mode="json")
    values["data"] |= {"streaming": True}
    values |= {"train": {"steps": 3, "rows_per_step": 4}, "adapter": {"rank": 4}}
    summary = methods.train(RunConfig.model_validate(values))
    assert summary["steps"] == 3
    assert torch.isfinite(torch.tensor(summary["loss"]))

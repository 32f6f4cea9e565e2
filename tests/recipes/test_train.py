"""Whole runs: they resume bit for bit, after a clean stop and after SIGKILL, and what they leave opens elsewhere."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from luthier.config import RunConfig
from luthier.engine.checkpoint import committed, read_record
from luthier.errors import CheckpointError, ConfigError, NonFiniteError
from luthier.hf.gather import local_part
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.recipes.dry_run import dry_run
from luthier.recipes.evaluate import evaluate
from luthier.recipes.export import export
from luthier.recipes.sft import train
from tests.soak import soaked
from tests.world import World

DATA = Path(__file__).parents[2] / "src" / "luthier" / "demo"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:24]))
    return path


def config(tmp_path: Path, rows: Path, name: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": {"train": str(rows), "validation_fraction": 0.2, "sequence_length": 256},
        "adapter": {"rank": 4, "dropout": 0.1},
        "optimizer": {"name": "adamw", "learning_rate": 1e-2},
        "schedule": {"name": "cosine", "warmup": 2},
        "train": {"epochs": 2, "rows_per_step": 4, "precision": "fp32"},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 2, "keep": 3},
        "output": str(tmp_path / name),
    }
    return RunConfig.model_validate(values | changes)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    [path] = (committed(run / "checkpoints")[-1] / "tensors").glob("*.safetensors")
    return load_file(path)


def assert_same_end(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    records = [read_record(committed(run / "checkpoints")[-1]) for run in (one, other)]
    for key in ("counters", "loader", "course", "layout", "optimizer"):
        assert records[0][key] == records[1][key], key
    states = [(committed(run / "checkpoints")[-1] / "random-00000.json").read_text() for run in (one, other)]
    assert states[0] == states[1]


CASES: dict[str, dict[str, Any]] = {
    "lora bf16": {"train": {"epochs": 2, "rows_per_step": 4, "precision": "bf16"}},
    "lora fp32 tokens": {"train": {"epochs": 2, "tokens_per_step": 300, "precision": "fp32"}},
    "full": {"adapter": None, "train": {"epochs": 2, "rows_per_step": 4, "precision": "fp32"}},
    "full stochastic": {
        "adapter": None,
        "optimizer": {"name": "stochastic_adamw", "learning_rate": 1e-3},
        "train": {"epochs": 2, "rows_per_step": 4, "precision": "bf16"},
    },
    "muon": {"adapter": None, "optimizer": {"name": "muon", "learning_rate": 1e-3}},
    "streaming": {"train": {"steps": 9, "rows_per_step": 4, "precision": "fp32"}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes = dict(CASES[case])
    if case == "streaming":
        changes["data"] = {"train": str(rows), "streaming": True, "shuffle_buffer": 8, "sequence_length": 256}
    whole = train(config(tmp_path, rows, "whole", **changes))
    from luthier.recipes import sft

    take_step, stop_at = sft.take_step, {3, 7}

    def stopping(run: sft.Run, batch: Any) -> dict[str, float]:
        measured = take_step(run, batch)
        if run.state.counters.step in stop_at:
            stop_at.discard(run.state.counters.step)
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(sft, "take_step", stopping)
    broken = config(tmp_path, rows, "broken", **changes)
    first = train(broken)
    assert first["interrupted"] == "SIGTERM"
    assert first["steps"] == 3
    assert train(broken)["steps"] == 7
    last = train(broken, resume="must")
    assert last["interrupted"] is None
    assert last["steps"] == whole["steps"]
    assert_same_end(tmp_path / "whole", tmp_path / "broken")
    steps = [json.loads(line)["step"] for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, whole["steps"] + 1))


def test_a_run_of_part_of_an_epoch_is_given_more_and_ends_with_a_checkpoint(tmp_path: Path, rows: Path) -> None:
    # 24 rows: one epoch of 5 steps, then 2 steps of 8 rows of which the last one is smaller
    plain = {"data": {"train": str(rows), "sequence_length": 256}, "checkpoint": {}, "evaluation": {}}
    short = config(tmp_path, rows, "run", train={"epochs": 1.3, "rows_per_step": 5, "precision": "fp32"}, **plain)
    assert train(short)["steps"] == 7
    longer = config(tmp_path, rows, "run", train={"epochs": 2, "rows_per_step": 5, "precision": "fp32"}, **plain)
    summary = train(longer)
    assert summary["steps"] == summary["steps_total"] == 11
    newest = committed(tmp_path / "run" / "checkpoints")[-1]
    assert read_record(newest)["counters"]["rows"] == 48


@pytest.mark.repeats
@pytest.mark.parametrize("adapter", [{"rank": 4}, None])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, rows: Path, adapter: Any) -> None:
    changes = {"adapter": adapter, "checkpoint": {"every": 1, "keep": 2}, "train": {"epochs": 3, "rows_per_step": 3}}
    train(config(tmp_path, rows, "whole", **changes))
    broken = config(tmp_path, rows, "broken", **changes)
    from luthier.config import dump_config

    (tmp_path / "run.yaml").write_text(dump_config(broken))
    command = [
        sys.executable,
        "-m",
        "tests.recipes.killable",
        str(tmp_path / "run.yaml"),
        str(soaked(4, 20)),
        "7",
        "2.5",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "broken")


def test_the_resolved_config_repeats_the_run(tmp_path: Path, rows: Path) -> None:
    from luthier.config import load_config

    train(config(tmp_path, rows, "first"))
    again = load_config(tmp_path / "first" / "config.yaml", output=tmp_path / "second")
    train(again)
    assert_same_end(tmp_path / "first", tmp_path / "second")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adapter": {"rank": 8}}, "adapter.rank was 4 and is 8"),
        ({"train": {"epochs": 2, "rows_per_step": 5, "precision": "fp32"}}, "rows_per_step was 4, is 5"),
        ({"model": "debug:qwen3"}, "model was '[0-9a-f]{16}' and is"),
        ({"data": {"train": str(DATA / "heldout.jsonl"), "sequence_length": 256}}, "the training rows are others"),
        ({"seed": 5}, "seed was 0 and is 5"),
    ],
)
def test_a_changed_run_is_not_gone_on_with(tmp_path: Path, rows: Path, changes: dict[str, Any], told: str) -> None:
    train(config(tmp_path, rows, "run"))
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=told):
        train(config(tmp_path, rows, "run", **changes))
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_the_exports_of_a_run_open_in_plain_transformers(tmp_path: Path, rows: Path) -> None:
    run = config(tmp_path, rows, "run", train={"epochs": 1, "rows_per_step": 4, "precision": "bf16"})
    summary = train(run)
    assert summary["form"] == "adapter"
    assert (tmp_path / "run" / "export" / "adapter_model.safetensors").is_file()
    told = export(tmp_path / "run", output=tmp_path / "merged")
    assert "merged 14 adapters" in told["merged"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert plain.dtype == torch.bfloat16
    ours = load_model(resolve(str(tmp_path / "merged")), dtype="bf16")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, ours(ids).logits)
    # The loss of the merged model is that of the adapted one up to the one rounding of each weight.
    merged = evaluate(run.model_copy(update={"model": str(tmp_path / "merged")}))
    adapted = evaluate(run, adapter=tmp_path / "run" / "export")
    assert merged["loss"] == pytest.approx(adapted["loss"], rel=5e-3)
    assert adapted["loss"] == pytest.approx(summary["validation"]["loss"], rel=1e-6)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 77"):
        export(tmp_path / "run", output=tmp_path / "other", step=77)


def test_an_export_takes_the_place_of_one_of_another_form(tmp_path: Path, rows: Path) -> None:
    short = {"train": {"steps": 1, "rows_per_step": 4, "precision": "fp32"}}
    lora, full = config(tmp_path, rows, "run", **short), config(tmp_path, rows, "run", adapter=None, **short)
    folder = tmp_path / "run" / "export"
    for run, there, gone in (
        (lora, "adapter_model.safetensors", "model.safetensors"),
        (full, "model.safetensors", "adapter_model.safetensors"),
        (lora, "adapter_model.safetensors", "model.safetensors"),
    ):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / ".export.0123.partial").mkdir()  # of a run that was killed while exporting
        train(run, resume="never")
        assert (folder / there).is_file()
        assert not (folder / gone).exists()
        assert not list((tmp_path / "run").glob(".export.*"))


def test_rows_that_a_stream_leaves_out_are_counted(tmp_path: Path, rows: Path) -> None:
    lines = ['{"text": ""}', *(json.dumps({"text": f"row {number}"}) for number in range(8))]
    rows.write_text("\n".join(lines), encoding="utf-8")
    data = {"train": str(rows), "streaming": True, "shuffle_buffer": 2, "sequence_length": 64}
    train_config = {"steps": 4, "rows_per_step": 4, "precision": "fp32"}
    summary = train(config(tmp_path, rows, "run", data=data, train=train_config, evaluation={}))
    assert summary["data"]["empty"] >= 1
    assert "empty, left out" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")


def test_evaluation_is_the_same_at_every_batch_size(tmp_path: Path, rows: Path) -> None:
    base = config(tmp_path, rows, "run")
    losses = []
    for length, packing in ((256, True), (256, False), (2048, True)):
        data = base.data.model_copy(update={"packing": packing, "sequence_length": length, "validation_fraction": 0.5})
        losses.append(evaluate(base.model_copy(update={"data": data}))["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_early_stopping_and_the_best_checkpoint(tmp_path: Path, rows: Path) -> None:
    # After four steps the learning rate is 0, and nothing lowers the validation loss any more.
    run = config(
        tmp_path,
        rows,
        "run",
        optimizer={"learning_rate": 1e-3},
        schedule={"name": "piecewise", "points": [[4, 1.0], [5, 0.0]]},
        train={"steps": 40, "rows_per_step": 4, "precision": "fp32"},
        evaluation={"every": 1, "early_stopping": 3},
        checkpoint={"keep": 1},
    )
    summary = train(run)
    assert summary["stopped_early"]
    assert summary["steps"] < 40
    assert summary["best"]["step"] == summary["steps"] - 3
    names = {path.name for path in committed(tmp_path / "run" / "checkpoints")}
    assert names == {f"step-{summary['best']['step']:06d}", f"step-{summary['steps']:06d}"}
    assert train(run)["steps"] == summary["steps"]  # a run that has stopped early does not go on from there


def test_a_validation_loss_that_is_not_finite_is_never_the_best(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.recipes import sft

    own, results = sft.evaluate, []

    def measured(*args: Any, **kwargs: Any) -> Any:
        results.append(own(*args, **kwargs))
        return replace(results[-1], loss=math.nan) if len(results) == 1 else results[-1]

    monkeypatch.setattr(sft, "evaluate", measured)
    summary = train(config(tmp_path, rows, "run", evaluation={"every": 1}, checkpoint={"keep": 1}))
    losses = [result.loss for result in results[1:]]
    assert summary["best"]["loss"] == min(losses)
    assert f"step-{summary['best']['step']:06d}" in {p.name for p in committed(tmp_path / "run" / "checkpoints")}


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_before_the_first_step_is_heeded_at_once(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[BaseException]
) -> None:
    from luthier.recipes import run as open_run

    def loading(*_: Any) -> None:
        os.kill(os.getpid(), number)
        pytest.fail("the signal was put off until the data and the model are loaded")

    monkeypatch.setattr(open_run, "rows_of", loading)
    with pytest.raises(raised):
        train(config(tmp_path, rows, "run"))


def test_the_directory_is_free_only_when_the_last_checkpoint_is_written(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from luthier.engine import checkpoint
    from luthier.recipes import sft

    write, take_step = checkpoint.write, sft.take_step

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    def failing(run: sft.Run, batch: Any) -> dict[str, float]:
        if run.state.counters.step == 2:
            raise RuntimeError("an error of one's own")
        return take_step(run, batch)

    monkeypatch.setattr(checkpoint, "write", slowly)
    monkeypatch.setattr(sft, "take_step", failing)
    with pytest.raises(RuntimeError, match="one's own"):
        train(config(tmp_path, rows, "run", evaluation={}))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]


def test_what_is_not_finite_is_named_or_skipped(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explosive = {"name": "sgd", "learning_rate": 1e38}
    run = config(tmp_path, rows, "stop", adapter=None, optimizer=explosive, schedule={"name": "constant"})
    with pytest.raises(NonFiniteError, match=r"step \d+: the loss is nan.*rows .*rows.jsonl:\d+"):
        train(run)

    from luthier.recipes import sft

    own, calls = sft.forward_backward_all, []

    def poisoned(state: Any, batches: Any) -> Any:
        calls.append(batches)
        return own(state, [batch.scaled(float("nan")) for batch in batches] if len(calls) == 1 else batches)

    monkeypatch.setattr(sft, "forward_backward_all", poisoned)
    calm = config(tmp_path, rows, "skip", train={"steps": 3, "rows_per_step": 4, "on_non_finite": "skip"})
    summary = train(calm)
    assert (summary["steps"], summary["skipped_steps"]) == (3, 1)

    def ruined(state: Any, batches: Any) -> Any:
        next(iter(state.trainable.values())).data.fill_(math.nan)
        return own(state, batches)

    # Weights that are not finite themselves spoil every later step: skipping them all would end in a ruined export.
    monkeypatch.setattr(sft, "forward_backward_all", ruined)
    with pytest.raises(NonFiniteError, match=r"the weight \S+ itself is not finite"):
        train(calm.model_copy(update={"output": tmp_path / "ruined"}))


def ruined_on_rank(values: dict[str, Any]) -> tuple[str, list[str]]:
    """On every rank: what is said of a step in which only the last one's parts of the weights are not finite, and the
    rows that this rank had."""
    from luthier.recipes import sft

    with sft.opened(RunConfig.model_validate(values), "never") as run:
        if dist.get_rank() == 1:
            for parameter in run.state.trainable.values():
                local_part(parameter).detach().fill_(math.nan)
        batch = next(iter(run.loader))
        own = [origin for microbatch in batch.microbatches for origin in microbatch.origins]
        try:
            sft.take_step(run, batch)
        except NonFiniteError as error:
            return str(error), own
        return "", own


def test_ranks_decide_alike_about_what_is_not_finite(tmp_path: Path, rows: Path, world: Callable[[int], World]) -> None:
    train = {"steps": 1, "rows_per_step": 4, "precision": "fp32", "on_non_finite": "skip"}
    run = config(tmp_path, rows, "run", adapter=None, train=train, parallel={"dp_shard": 2})
    (said, first), (same, second) = world(2).run(ruined_on_rank, run.model_dump(mode="json"))
    assert said == same
    assert re.search(r"the weight \S+ itself is not finite", said)
    assert len({*first, *second}) == 4
    assert all(row in said for row in first + second)


def test_two_runs_do_not_share_a_directory(tmp_path: Path, rows: Path) -> None:
    from luthier.recipes.run_directory import RunDirectory

    run = config(tmp_path, rows, "run")
    with RunDirectory(run.output).locked(), pytest.raises(ConfigError, match="another run is writing here"):
        train(run)


def test_a_dry_run_writes_nothing(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from luthier.report import reporter

    monkeypatch.setattr(reporter, "open_tracker", lambda *_, **__: pytest.fail("a rehearsal reached a tracker"))
    told = dry_run(config(tmp_path, rows, "run", report={"trackers": ["wandb"]}))
    assert told["steps"] == 10
    assert len(told["losses"]) == 2
    assert told["seconds"] > 0
    assert not (tmp_path / "run").exists()


def test_must_resume_without_a_checkpoint_is_refused(tmp_path: Path, rows: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to go on from"):
        train(config(tmp_path, rows, "run"), resume="must")
    assert not (tmp_path / "run").exists()


def test_a_damaged_record_is_refused_by_name(tmp_path: Path, rows: Path) -> None:
    run = config(tmp_path, rows, "run")
    train(run)
    checkpoint = committed(run.output / "checkpoints")[-1]
    record = read_record(checkpoint)
    broken: list[Any] = [[], {}, *({k: v for k, v in record.items() if k != key} for key in ("of", "course", "loader"))]
    broken += [{**record, key: "x"} for key in ("of", "course", "loader", "counters", "optimizer")]
    for value in broken:
        (checkpoint / "state.json").write_text(json.dumps(value))
        with pytest.raises(
            CheckpointError, match=r"state\.json is damaged .*remove this directory to go on from an older"
        ):
            train(run)
    (checkpoint / "state.json").write_text(json.dumps(record))
    states = (checkpoint / "random-00000.json").read_text()
    (checkpoint / "random-00000.json").write_text('{"python": 3}')
    with pytest.raises(CheckpointError, match=r"random-00000\.json is damaged"):
        train(run)
    (checkpoint / "random-00000.json").write_text(states)
    # one that is nobody's best does not stop the run either
    older = committed(run.output / "checkpoints")[0]
    (older / "state.json").write_text("{}")
    (checkpoint / "state.json").write_text(json.dumps(record))
    longer = run.model_copy(update={"train": run.train.model_copy(update={"epochs": 2.5})})
    assert train(longer)["steps"] > record["counters"]["step"]
    with pytest.raises(CheckpointError, match="and the run now ends after"):
        train(run.model_copy(update={"train": run.train.model_copy(update={"epochs": 1.0})}))


def test_an_export_refuses_another_base_or_scale_than_was_trained(tmp_path: Path, rows: Path) -> None:
    run = config(tmp_path, rows, "run")
    train(run)
    text = (run.output / "config.yaml").read_text()
    for old, new, told in (
        ("seed: 0", "seed: 1", "weights of the model was"),
        ("alpha: null", "alpha: 64", "adapter.alpha was None and is 64"),
    ):
        assert text.count(old) == 1
        (run.output / "config.yaml").write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match=told):
            export(run.output, output=tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_metrics_that_cannot_be_read_are_named(tmp_path: Path, rows: Path) -> None:
    run = config(tmp_path, rows, "run")
    train(run)
    for line in (b"\xff\xfe", b"[]", b"5", b'{"step": null}', b"{}"):
        (run.output / "metrics.jsonl").write_bytes(line + b"\n")
        with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: is no row of metrics; take the line out"):
            train(run)

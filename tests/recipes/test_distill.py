"""Runs that learn from a teacher: they come near it, go on bit for bit, and refuse one of another vocabulary."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from luthier.config import RunConfig
from luthier.errors import ConfigError, ModelError
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.recipes import distill, sft, taught
from luthier.recipes.dry_run import dry_run
from tests.oracles.plain import save_strong
from tests.recipes.test_train import assert_same_end


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"text": f"{letter} is followed by {letter}"} for letter in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_strong(debug_config("qwen3"), tmp_path / "teacher", seed=3)
    debug_tokenizer().save_pretrained(tmp_path / "teacher")
    return tmp_path


def config(place: Path, name: str, method: dict[str, Any], **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": {"train": str(place / "rows.jsonl"), "sequence_length": 64},
        "method": {"name": "distill", "teacher": str(place / "teacher")} | method,
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 12, "rows_per_step": 4, "precision": "fp32"},
        "checkpoint": {"every": 2},
        "output": str(place / name),
    }
    return RunConfig.model_validate(values | changes)


def losses(run: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (run.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", [{}, {"divergence": "jsd", "beta": 0.3, "top_k": 20}], ids=str)
def test_the_model_comes_near_its_teacher_and_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    whole, broken = (config(place, name, method) for name in ("whole", "broken"))
    distill.train(whole)
    found = losses(whole)
    assert found[-1] < 0.7 * found[0]
    take_step = distill.take_step

    def stopping(run: Any, batch: Any) -> dict[str, float]:
        measured = take_step(run, batch)
        if run.state.counters.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(distill, "take_step", stopping)
    assert distill.train(broken)["steps"] == 3
    monkeypatch.setattr(distill, "take_step", take_step)
    distill.train(broken, resume="must")
    assert_same_end(whole.output, broken.output)


def test_a_teacher_that_is_asked_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"divergence": "jsd", "beta": 0.3, "top_k": 20, "temperature": 1.5, "cross_entropy": 0.2}
    live = config(place, "live", how)
    kept = config(place, "kept", how | {"precompute": True})
    distill.train(live)
    distill.train(kept)
    assert losses(kept) == pytest.approx(losses(live), rel=1e-5)
    monkeypatch.setattr(distill, "teacher_of", lambda *_: pytest.fail("it has been asked already"))
    longer = kept.model_copy(update={"train": kept.train.model_copy(update={"steps": 14})})
    assert distill.train(longer)["steps"] == 14
    with pytest.raises(ValueError, match=r"set method\.top_k, and do not stream"):
        config(place, "run", {"precompute": True})


def test_a_teacher_that_is_gone_or_another(place: Path) -> None:
    run = config(place, "run", {"top_k": 20, "precompute": True})

    def longer(steps: int, **method: Any) -> RunConfig:
        train, asked = run.train.model_copy(update={"steps": steps}), run.method.model_copy(update=method)
        return run.model_copy(update={"train": train, "method": asked})

    def said() -> bytes:
        return (run.output / "teacher" / "teacher_ids.bin").read_bytes()

    distill.train(longer(2))
    first = said()
    save_strong(debug_config("qwen3"), place / "teacher", seed=4)
    distill.train(longer(4))
    assert said() != first  # of the teacher that is there now
    second = said()
    shutil.rmtree(place / "teacher")
    assert distill.train(longer(6))["steps"] == 6
    assert said() == second
    with pytest.raises(ModelError, match="no file or directory"):
        distill.train(longer(8, top_k=10))  # it has not said that


def test_a_teacher_is_asked_about_the_rows_that_the_run_comes_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    likeliest = taught.likeliest

    def counting(teacher: Any, batch: Any, *how: Any) -> Any:
        asked.extend(row.number for row in batch.rows if row.number >= 0)
        return likeliest(teacher, batch, *how)

    monkeypatch.setattr(taught, "likeliest", counting)
    small: dict[str, Any] = {"steps": 5, "rows_per_step": 1, "precision": "fp32"}
    how = {"top_k": 20, "cross_entropy": 0.2}
    run = config(place, "run", how | {"precompute": True}, train=small)
    found = dry_run(run)
    assert len(asked) == 2
    for steps, rows in ((3, 5), (5, 7)):  # each asks about what the one before has not
        distill.train(run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})}))
        assert len(asked) == rows
    live = config(place, "live", how, train=small)
    distill.train(live)
    assert losses(run) == pytest.approx(losses(live), rel=1e-5)
    assert found["losses"] == pytest.approx(losses(live)[:2], rel=1e-5)


def on_rank(values: dict[str, Any]) -> dict[str, Any]:
    return distill.train(RunConfig.model_validate(values))


def test_data_ranks_share_what_the_teacher_said(world: Any, place: Path) -> None:
    how = {"top_k": 20, "precompute": True}
    more = {"train": {"steps": 3, "rows_per_step": 3, "precision": "fp32"}, "optimizer": {"name": "sgd"}}
    alone, both = config(place, "alone", how, **more), config(place, "both", how, parallel={"dp_shard": 2}, **more)
    distill.train(alone)
    world(2).run(on_rank, both.model_dump(mode="json"))
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)


def test_a_teacher_with_adapters_over_the_same_base(place: Path) -> None:
    values = config(place, "taught", {}, adapter={"rank": 4}).model_dump() | {"method": "sft"}
    learnt = RunConfig.model_validate(values)
    sft.train(learnt)
    own = {"teacher": "debug:llama", "divergence": "reverse"}
    alone = config(place, "alone", own, adapter={"rank": 4}, train={"steps": 1})
    distill.train(alone)
    assert losses(alone) == [pytest.approx(0.0, abs=1e-6)]  # the model is its own teacher
    run = config(place, "run", own | {"teacher_adapter": str(learnt.output / "export")}, train={"steps": 1})
    distill.train(run)
    assert losses(run)[0] > 1e-3


def test_a_teacher_of_another_vocabulary_is_refused_before_it_is_read(place: Path) -> None:
    other = AutoTokenizer.from_pretrained(place / "teacher")
    other.add_tokens(["<new>"])
    other.save_pretrained(place / "teacher")
    (place / "teacher" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"it has '<new>' at \d+, and the model has no '<new>'"):
        distill.train(config(place, "run", {}))
    with pytest.raises(ValueError, match="beta is of jsd, and the divergence is forward"):
        config(place, "run", {"beta": 0.2})


def test_a_teacher_of_more_logits_is_refused(place: Path) -> None:
    save_strong(debug_config("qwen3", vocab_size=512), place / "teacher")
    with pytest.raises(ConfigError, match="it gives logits of 512 tokens, and the model of"):
        distill.train(config(place, "run", {}))


@pytest.mark.parametrize("precompute", [True, False])
def test_more_tokens_than_the_vocabulary_has_are_refused(place: Path, precompute: bool) -> None:
    size = debug_config("llama").vocab_size
    run = config(place, "run", {"top_k": 100_000, "precompute": precompute})
    with pytest.raises(ConfigError, match=rf"method\.top_k: it is 100,000, and the vocabulary has {size:,} tokens"):
        distill.train(run)
    most = config(place, "run", {"top_k": size, "precompute": precompute}, train={"steps": 1})
    assert distill.train(most)["steps"] == 1

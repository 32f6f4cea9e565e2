"""GRPO on one-digit sums: the share of right answers, step by step, on several seeds; writes grpo.md beside this file.

`OMP_NUM_THREADS=1 python benchmarks/grpo.py` runs `grpo.yaml` with each seed, one after another.
"""

import argparse
import json
import resource
from pathlib import Path

from luthier.config import load_config
from luthier.recipes.methods import train

HERE = Path(__file__).parent
HEAD = """# GRPO on one-digit sums

Written by `benchmarks/grpo.py`: `benchmarks/grpo.yaml` on each seed. SmolLM2-135M-Instruct, LoRA of rank 16, {steps}
steps of {rows} prompts with {size} answers each at temperature 1, one thread; an answer is right if it is the number
and the end of the line. Asked for: the mean of the last five steps at least 0.15 above that of the first five, on
three seeds.

| seed | first five | last five | more | CPU-seconds |
| --- | --- | --- | --- | --- |
"""

parser = argparse.ArgumentParser()
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--steps", type=int)
arguments = parser.parse_args()


def cpu() -> float:
    """CPU-seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


rows, curves = [], []
config = load_config(HERE / "grpo.yaml")
if arguments.steps:
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": arguments.steps})})
for seed in arguments.seeds:
    output = Path(f"{config.output}-{seed}")
    before = cpu()
    train(config.model_copy(update={"seed": seed, "output": output}), resume="never")
    used = cpu() - before
    told = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    right = [line["reward/correct"] for line in told]
    first, last = sum(right[:5]) / 5, sum(right[-5:]) / 5
    rows.append(f"| {seed} | {first:.2f} | {last:.2f} | {last - first:.2f} | {used:.0f} |")
    curves.append(f"seed {seed}: " + " ".join(f"{share:.2f}" for share in right))
    print(rows[-1], curves[-1], sep="\n", flush=True)
method = config.method
head = HEAD.format(steps=config.train.steps, rows=config.train.rows_per_step, size=method.group_size)
curve = "\n\nRight answers, step by step:\n\n```text\n" + "\n".join(curves) + "\n```\n"
(HERE / "grpo.md").write_text(head + "\n".join(rows) + curve, encoding="utf-8")

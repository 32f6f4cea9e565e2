"""QLoRA beside PEFT's: the same NF4 weights, rows, order, adapter values and optimizer, and what held-out rows say.

    python benchmarks/qlora.py [--steps 50] [--rows-per-step 4] [--longest 160] [--precision bf16]

SmolLM2-135M-Instruct on the conversations of the demo. Three sides, each a process of its own: Luthier with
`adapter.quantize: nf4`; unmodified Transformers (`BitsAndBytesConfig`) with PEFT; and Luthier on the plain base.
Printed are the held-out loss before and after, tokens per CPU-second of the steps (the first two left out), and the
peak of memory above imports while they run. Linux only; `qlora.md` has a result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import Meter, status
from workloads import IGNORED, Row, default_directory, prepare

HELD_OUT = 24
RANK, ALPHA, RATE = 16, 32, 2e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows-per-step", type=int, default=4)
    parser.add_argument("--longest", type=int, default=160, help="tokens; longer rows are passed over")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--sides", nargs="+", default=["luthier", "peft", "plain"])
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "ADAPTER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        side, adapter = arguments.child
        measure(arguments, side, Path(adapter))
        return
    print(f"{'side':<8} {'before':>8} {'after':>8} {'tokens/CPU s':>12} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as scratch:
        for side in arguments.sides:  # Luthier first: it writes the adapter that PEFT begins with
            command = [sys.executable, __file__, *sys.argv[1:], "--child", side, f"{scratch}/adapter"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            losses = f"{found['before']:>8.4f} {found['after']:>8.4f}"
            print(f"{side:<8} {losses} {found['rate']:>12.1f} {found['peak'] / 1e6:>8.0f}", flush=True)
            if said := found.get("said"):
                print(f"         {said}")


def read_rows(arguments: argparse.Namespace) -> tuple[Path, list[list[Row]], list[Row]]:
    """The model, the rows of each step, and those held out."""
    workload = prepare("smollm2", default_directory())
    rows = [row for row in workload.read() if len(row.input_ids) <= arguments.longest]
    held_out, rest = rows[:HELD_OUT], rows[HELD_OUT:]
    size = arguments.rows_per_step
    taken = [[rest[(step * size + place) % len(rest)] for place in range(size)] for step in range(arguments.steps)]
    return workload.model, taken, held_out


def measure(arguments: argparse.Namespace, side: str, adapter: Path) -> None:
    import torch

    torch.set_num_threads(1)
    model, steps, held_out = read_rows(arguments)
    make = peft_side if side == "peft" else luthier_side
    step, loss = make(side, model, adapter, arguments.precision)
    said = getattr(step, "said", None)
    before = loss(held_out)
    meter = Meter(warmup=2)
    Path("/proc/self/clear_refs").write_text("5")
    meter.start()
    for rows in steps:
        value = step(rows)
        meter.step(tokens=sum(len(row.input_ids) for row in rows), trained=sum(row.trained for row in rows), loss=value)
    peak = status("VmHWM") - BASELINE["imports"]
    rate = meter.result()["tokens_per_cpu_second"]
    print(json.dumps({"before": before, "after": loss(held_out), "rate": rate, "peak": peak, "said": said}))


BASELINE: dict[str, int] = {}


def luthier_side(side: str, model: Path, adapter: Path, precision: Any) -> tuple[Any, Any]:
    """Luthier's step and held-out loss."""
    import torch

    from luthier.adapters import save_peft
    from luthier.batch import Batch, Sample
    from luthier.config import LoraConfig
    from luthier.config.sections import AdamWConfig
    from luthier.engine.build import build_state
    from luthier.engine.evaluate import evaluate
    from luthier.engine.step import forward_backward_all, optim_step
    from luthier.hf.source import resolve

    def build(source: str) -> Any:
        return build_state(
            resolve(source),
            adapter=LoraConfig(rank=RANK, alpha=ALPHA, dtype="fp32", quantize=None if side == "plain" else "nf4"),
            optimizer=AdamWConfig(learning_rate=RATE),
            precision=precision,
            device=torch.device("cpu"),
        )

    build("debug:llama")
    BASELINE["imports"] = status("VmRSS")
    state = build(str(model))
    if side != "plain":
        save_peft(state.model, adapter, base_model=str(model))

    def batch(rows: list[Row]) -> Batch:
        return Batch.pack([Sample.from_ids(r.input_ids, [float(label != IGNORED) for label in r.labels]) for r in rows])

    def step(rows: list[Row]) -> float:
        packed = batch(rows)
        [output] = forward_backward_all(state, [packed.scaled(1 / packed.total_weight)])
        optim_step(state, loss=float(output.loss), learning_rate_factor=1.0, max_gradient_norm=1.0)
        return float(output.loss)

    def loss(rows: list[Row]) -> float:
        found = evaluate(state, [batch([row]) for row in rows]).loss
        state.model.train()
        return found

    step.said = str(state.lora)  # type: ignore[attr-defined]
    return step, loss


def peft_side(side: str, model: Path, adapter: Path, precision: str) -> tuple[Any, Any]:
    """Plain Transformers' and PEFT's, each row alone. bitsandbytes evaluates in another way than it trains (scales in
    bf16, on a CPU), so the model stays in training mode; nothing is dropped out."""
    import torch
    from peft import PeftModel
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    torch.nn.Linear(8, 8)(torch.ones(2, 8))
    BASELINE["imports"] = status("VmRSS")
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=how, dtype=dtype)
    tuned = PeftModel.from_pretrained(base, str(adapter), is_trainable=True).train()
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)

    def total(row: Row) -> Any:
        logits = tuned(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
        return F.cross_entropy(logits.float(), torch.tensor(row.labels[1:]), ignore_index=IGNORED, reduction="sum")

    def step(rows: list[Row]) -> float:
        count = sum(row.trained for row in rows)
        value = 0.0
        for row in rows:
            part = total(row) / count
            part.backward()
            value += float(part.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value

    def loss(rows: list[Row]) -> float:
        with torch.no_grad():
            return sum(float(total(row)) for row in rows) / sum(row.trained for row in rows)

    return step, loss


if __name__ == "__main__":
    main()

"""Peak memory of a rank, above what it takes to import everything, when a model is shared out over ranks.

    python benchmarks/shard_memory.py [--hidden 1024] [--ranks 4] [--precision fp32] [--keep DIRECTORY]

For one process and for `dp_shard` ranks, each a process of its own: the model is made (from random weights, or read
from the files that the run before has exported), takes two steps, saves a checkpoint and is exported. Printed is the
highest resident size so far at the end of each part, of the rank that needed most, and below it the ratio to one
process. Figures are VmHWM, which counts pages of mapped files too. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import status

PARTS = ("loading", "steps", "checkpoint", "export")
RANDOM, FILES = "random weights", "from files"
TOKENS, VOCABULARY = 64, 32_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="of 28 layers: 1024 makes 503M parameters, 512 126M")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--keep", type=Path, help="write exports and checkpoints here")
    parser.add_argument("--child", nargs=3, metavar=("SOURCE", "DIRECTORY", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        source, directory, precision = arguments.child
        measure(source, Path(directory), precision)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch)
        model = directory / "config"
        size = write_config(model, arguments.hidden)
        print(f"{size / 1e6:.0f}M parameters, {arguments.precision}, AdamW; MB above imports, of the largest rank")
        print(f"{'weights':<16} {'ranks':>5} " + " ".join(f"{part:>10}" for part in PARTS) + f" {'ratio':>7}")
        for source in (RANDOM, FILES):
            one = None
            for ranks in (1, arguments.ranks):
                origin = model if source == RANDOM else directory / "export-1"
                peaks = run(str(origin), directory, arguments.precision, ranks)
                one = one or peaks
                cells = " ".join(f"{peaks[part] / 1e6:>10.0f}" for part in PARTS)
                print(f"{source:<16} {ranks:>5} {cells} {peaks['export'] / one['export']:>7.3f}", flush=True)
                parts = " ".join(f"{peaks[part] / one[part]:>10.3f}" for part in PARTS)
                print(f"{'':<16} {'':>5} {parts}", flush=True)


def write_config(directory: Path, hidden: int) -> int:
    """A Llama-shaped config in which layers and embedding have the same shares of every size; returns parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from luthier.hf.load import build_on_meta

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY * hidden // 1024,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    model = build_on_meta(LlamaForCausalLM, config)
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("lm_head"))


def run(source: str, directory: Path, precision: str, ranks: int) -> dict[str, int]:
    """The largest rank's peak by the end of each part."""
    store = directory / f"store-{ranks}-{Path(source).name}"
    command = [sys.executable, __file__, "--child", source, str(directory), precision]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    children = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "STORE": str(store), "OMP_NUM_THREADS": threads}
            | {"HF_HUB_OFFLINE": "1"},
        )
        for rank in range(ranks)
    ]
    found: list[dict[str, int]] = []
    for child in children:
        text, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"a rank ended with {child.returncode}")
        found.append(json.loads(text.splitlines()[-1]))
    return {part: max(peaks[part] for peaks in found) for part in PARTS}


def measure(source: str, directory: Path, precision: Any) -> None:
    """One rank: print its peak by the end of each part, above what it was before the model."""
    import torch
    import torch.distributed as dist

    from luthier.adapters import Merging
    from luthier.batch import Batch, Sample
    from luthier.config import ParallelConfig
    from luthier.config.sections import AdamWConfig
    from luthier.engine.build import build_state
    from luthier.engine.checkpoint import Checkpointer
    from luthier.engine.step import forward_backward_all, optim_step
    from luthier.hf.save import save_model
    from luthier.hf.source import resolve
    from luthier.parallel.layout import Layout
    from luthier.parallel.mesh import Mesh

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, parallel = torch.device("cpu"), ParallelConfig(dp_shard=ranks)
    mesh = None
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=ranks)
        mesh = Mesh(Layout.resolve(parallel, ranks), device)
    optimizer = AdamWConfig(learning_rate=1e-4)
    how: dict[str, Any] = {"adapter": None, "optimizer": optimizer, "precision": precision, "device": device}
    how |= {"mesh": mesh, "parallel": parallel if mesh else None}
    build_state(resolve("debug:llama"), **how)  # what Transformers imports only now
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    peaks: dict[str, int] = {}

    def note(part: str) -> None:
        peaks[part] = status("VmHWM") - before

    state = build_state(resolve(source), from_scratch=Path(source).name == "config", **how)
    note("loading")
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        ids = torch.randint(0, 8_000, (TOKENS + 1,), generator=generator).numpy()
        batch = Batch.pack([Sample.from_ids(ids, torch.ones(TOKENS + 1).numpy(), "row")])
        forward_backward_all(state, [batch.scaled(1 / (TOKENS * ranks))])
        optim_step(state, max_gradient_norm=1.0)
    note("steps")
    checkpoints = Checkpointer(directory / f"checkpoints-{ranks}", keep=1, asynchronous=False)
    checkpoints.clear() if rank == 0 else None
    if mesh is not None:
        mesh.wait()
    checkpoints.save(state, {})
    note("checkpoint")
    group = dist.group.WORLD if mesh is not None else None
    out = directory / f"export-{ranks}"
    save_model(state.model, out, tokenizer=None, transform=Merging(state.model), group=group)
    note("export")
    print(json.dumps(peaks), flush=True)
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

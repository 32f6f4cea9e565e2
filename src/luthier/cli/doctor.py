"""`luthier doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from luthier.cli.frame import Answer, JsonOption, entries, verb

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pydantic", "numba")
OF_EXTRAS = ("peft", "gguf", "accelerate")
SIZE = 1024
"""Rows and columns of the matrices whose product is timed: about a layer of a small model."""

app = verb("doctor")


@app.command()
def doctor(
    hub: Annotated[bool, typer.Option("--hub", help="Also ask whether the Hugging Face Hub answers.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """Say what this machine has: versions, devices, threads, measured speed of matrix products, cache directories."""
    result = examine(hub=hub)
    return Answer(result, _lines(result))


def examine(*, hub: bool = False) -> dict[str, Any]:
    """All that can be known without a model; contacts the Hub only when asked."""
    import psutil
    import torch

    from luthier import __version__

    result: dict[str, Any] = {
        "versions": {"luthier": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES + OF_EXTRAS},
        "system": platform.platform(),
        "cpu": {
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "memory": {"total_bytes": psutil.virtual_memory().total, "free_bytes": psutil.virtual_memory().available},
        "devices": _devices(),
        "speed": {
            str(device): {name: _flops(device, dtype) for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))}
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
        },
        "caches": _caches(),
    }
    if hub:
        result["hub"] = _hub()
    return result


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "device": f"cuda:{index}",
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
            "bf16": torch.cuda.is_bf16_supported(),
        }
        for index in range(torch.cuda.device_count())
    ]
    if not devices:
        devices.append({"name": platform.processor() or platform.machine(), "device": "cpu"})
    if torch.backends.mps.is_available():
        devices.append({"name": "Apple GPU", "device": "mps"})
    return devices


def _flops(device: str, dtype: str) -> float:
    """Floating-point operations a second of a matrix product; the best of several, since the machine may be busy."""
    import torch

    size = SIZE if device == "cpu" else 8 * SIZE
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def _caches() -> dict[str, str]:
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from luthier.data.cache import cache_directory

    return {
        "hub": HF_HUB_CACHE,
        "tokenised_rows": str(cache_directory()),
        "hub_offline": "yes" if HF_HUB_OFFLINE else "no",
    }


def _hub() -> dict[str, Any]:
    from huggingface_hub import HfApi

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        HfApi().model_info("gpt2", timeout=10)
    except Exception as error:  # whatever keeps it from answering is the answer here
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return {"endpoint": endpoint, "answers": False, "reason": reason}
    return {"endpoint": endpoint, "answers": True}


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    shown = dict(result)
    shown["memory"] = {key.removesuffix("_bytes"): _gib(value) for key, value in result["memory"].items()}
    shown["devices"] = [
        {key.removesuffix("_bytes"): _gib(value) if key == "memory_bytes" else value for key, value in device.items()}
        for device in result["devices"]
    ]
    shown["speed"] = {
        device: {dtype: f"{rate / 1e9:,.0f} GFLOP/s" for dtype, rate in rates.items()}
        for device, rates in result["speed"].items()
    }
    yield from entries(shown)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"

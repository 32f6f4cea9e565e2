"""This machine's own rate of matrix products, the ceiling that both sides are held against; prints one JSON line.

Run it in a process of its own with the threads that are to be measured: `python benchmarks/gemm.py --threads 1`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from meter import cpu_seconds

SHAPES = ((2048, 2048, 2048), (2048, 512, 8192), (2048, 8192, 512), (4096, 4096, 1024), (1024, 4096, 4096))
"""Rows, inner dimension, columns: of the kind that training has, and large enough to be near the best."""
SECONDS = 0.5


def _rate(product: Callable[[], object], flops: float) -> float:
    """Operations per CPU-second of the fastest of ten slices of `SECONDS` in all."""
    product()
    best, spent = 0.0, 0.0
    while spent < SECONDS:
        before = sum(cpu_seconds())
        repeats = 0
        while (elapsed := sum(cpu_seconds()) - before) < SECONDS / 5:
            product()
            repeats += 1
        best = max(best, repeats * flops / elapsed)
        spent += elapsed
    return best


def measure(dtype: torch.dtype) -> float:
    """Best rate over `SHAPES` in floating point operations per CPU-second, by torch's own product and, for fp32,
    by oneDNN's too, which is faster than MKL on some CPUs."""
    best = 0.0
    for rows, inner, columns in SHAPES:
        left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        flops = 2.0 * rows * inner * columns

        def plain(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(left, right.t(), out=out)

        def onednn(left: torch.Tensor = left, right: torch.Tensor = right) -> torch.Tensor:
            linear = torch.ops.mkldnn._linear_pointwise
            result: torch.Tensor = linear(left, right, None, "none", [], "")
            return result

        best = max(best, _rate(plain, flops))
        if dtype == torch.float32 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            best = max(best, _rate(onednn, flops))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps({"bf16": measure(torch.bfloat16), "fp32": measure(torch.float32)}))


if __name__ == "__main__":
    main()

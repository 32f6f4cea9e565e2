"""What each fast way is worth: one training step on the CPU, with and without it, in turn in one process.

    python benchmarks/cpu_step.py --mode lora --precision bf16 --allocator

The model is the Qwen3 shape hidden 512, 8 layers, vocabulary 151,936, random; rows of 2,000 tokens packed from
documents of 16 to 512 tokens, the second half of each trained on; one thread. Times are CPU seconds (user and system).
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM

from luthier.adapters.lora import apply_lora
from luthier.batch import Batch, Sample
from luthier.config import LoraConfig
from luthier.hf.allocator import tune_allocator
from luthier.hf.fast_cpu import accelerate_model
from luthier.hf.rows.attention import document_mask, register_attention
from luthier.hf.rows.documents import documents, documents_of
from luthier.losses.cross_entropy import streamed_cross_entropy

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROW, SHORTEST, LONGEST = 2000, 16, 512


@dataclass(frozen=True)
class Variant:
    """Which of the fast ways are on."""

    name: str
    attention: str = "hand"
    head: str = "hand"
    norms: bool = False
    grouped: bool = False


def variants(mode: str) -> list[Variant]:
    """By hand, each fast way alone, and all together."""
    result = [
        Variant("by hand"),
        Variant("attention in blocks", attention="luthier"),
        Variant("streamed head", head="streamed"),
        Variant("norms in few passes", norms=True),
    ]
    if mode == "lora":
        result.append(Variant("grouped LoRA", grouped=True))
    return [*result, Variant("all", attention="luthier", head="streamed", norms=True, grouped=True)]


def hand_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """torch's fused attention, one call a document."""
    packed = documents_of(attention_mask)
    spans = packed.spans if packed is not None else [(0, query.shape[2])]
    pieces = []
    for start, stop in spans:
        q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2))
    return torch.cat(pieces, dim=1), None


class HandHead(torch.autograd.Function):
    """Logits in chunks of 256 trained positions, gradient made in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, train: bool
    ) -> torch.Tensor:
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if train else None
        total = torch.zeros(())
        for start in range(0, len(hidden), 256):
            h, y = hidden[start : start + 256], targets[start : start + 256]
            logits = (h @ weight.T).float()
            logsumexp = logits.logsumexp(-1)
            total += (logsumexp - logits.gather(1, y[:, None])[:, 0]).sum()
            p = logits.sub_(logsumexp[:, None]).exp_()
            p[torch.arange(len(y)), y] -= 1
            p = p.to(h.dtype)
            d_hidden[start : start + 256] = p @ weight
            if d_weight is not None:
                d_weight.addmm_(p.T, h)
        ctx.save_for_backward(d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0].to(d_hidden.dtype)
        return d_hidden * scale, None if d_weight is None else d_weight * scale, None, None


class HandLora(torch.nn.Linear):
    """The formula, operation by operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.hand_A), self.hand_B) * 2.0


def build(variant: Variant, mode: str, dtype: torch.dtype) -> Any:
    """The model, as this variant wants it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=variant.attention, dtype=dtype).train()
    if mode == "lora" and variant.grouped:
        apply_lora(model, LoraConfig(rank=16, alpha=32, target=["all-linear"]))
    elif mode == "lora":
        model.requires_grad_(False)
        for module in list(model.model.modules()):
            if isinstance(module, torch.nn.Linear):
                module.__class__ = HandLora
                module.hand_A = torch.nn.Parameter(torch.randn(16, module.in_features, dtype=dtype) * 0.02)
                module.hand_B = torch.nn.Parameter(torch.zeros(module.out_features, 16, dtype=dtype))
    if variant.norms:
        accelerate_model(model)
    return model


def rows(count: int) -> list[Batch]:
    """Packed rows of ROW tokens."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        lengths: list[int] = []
        while sum(lengths) < ROW:
            lengths.append(int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=generator)))
        lengths[-1] -= sum(lengths) - ROW
        samples = []
        for length in lengths:
            ids = torch.randint(0, 151936, (length + 1,), generator=generator).numpy()
            samples.append(Sample.from_ids(ids, [0.0] * (length // 2 + 1) + [1.0] * (length - length // 2)))
        result.append(Batch.pack(samples))
    return result


def stepper(variant: Variant, mode: str, dtype: torch.dtype) -> Callable[[Batch], float]:
    """A function that trains one step and returns the loss."""
    model = build(variant, mode, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(batch: Batch) -> float:
        with documents(batch.cu_seqlens):
            hidden = model.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)[0][0]
        weight, targets, weights = model.lm_head.weight, batch.targets[0], batch.weights[0]
        if variant.head == "hand":
            chosen = weights.nonzero()[:, 0]
            loss = HandHead.apply(hidden[chosen], weight, targets[chosen], weight.requires_grad) / weights.sum()
        else:
            loss, _ = streamed_cross_entropy(hidden, weight, targets, weights / weights.sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["lora", "full"], default="lora")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--allocator", action="store_true", help="tune the allocator first")
    parser.add_argument("--only", nargs="*", help="variants by name; one alone also tells its memory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.allocator:
        tune_allocator(keep=True)
    register_attention()
    AttentionInterface.register("hand", hand_attention)
    AttentionMaskInterface.register("hand", document_mask)
    batches = rows(arguments.steps + 1)
    chosen = [v for v in variants(arguments.mode) if arguments.only is None or v.name in arguments.only]
    steps = {v: stepper(v, arguments.mode, DTYPES[arguments.precision]) for v in chosen}
    times: dict[Variant, list[float]] = {v: [] for v in chosen}
    losses = dict.fromkeys(chosen, 0.0)
    for number, batch in enumerate(batches):
        for v, step in steps.items():
            start = time.process_time()
            losses[v] = step(batch)
            if number:
                times[v].append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{arguments.mode} {arguments.precision}, allocator {'tuned' if arguments.allocator else 'as it is'}\n")
    print("| | tok/CPU-s, median | best step | / by hand, best | last loss |\n| --- | --- | --- | --- | --- |")
    for v in chosen:
        ordered = sorted(times[v])
        factor = min(times[chosen[0]]) / ordered[0]
        median, best = ROW / ordered[len(ordered) // 2], ROW / ordered[0]
        print(f"| {v.name} | {median:.0f} | {best:.0f} | {factor:.2f} | {losses[v]:.4f} |")
    if len(chosen) == 1:
        print(f"\npeak memory {peak:.0f} MB")


if __name__ == "__main__":
    main()

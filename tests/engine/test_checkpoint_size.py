"""What a LoRA checkpoint of a model people use takes on disk."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from luthier.adapters import apply_lora, finish_lora, is_adapter_weight
from luthier.config import LoraConfig
from luthier.config.sections import AdamWConfig
from luthier.engine.checkpoint import Checkpointer
from luthier.engine.state import TrainState
from luthier.hf.source import resolve
from luthier.optim.build import build_optimizer

QWEN3_06B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    tie_word_embeddings=True,
)


def test_rank_16_on_the_attention_of_qwen3_takes_at_most_46_mib(tmp_path: Path) -> None:
    lora = LoraConfig(rank=16, target=["attn"])
    with torch.device("meta"):
        model = Qwen3ForCausalLM(QWEN3_06B).to(torch.bfloat16)
    apply_lora(model, lora)
    model.to_empty(device="cpu")  # the frozen weights are never read, so their pages never exist
    model.tie_weights()
    finish_lora(model, lora)
    optimizer = build_optimizer(model.named_parameters(), AdamWConfig(), adapters=is_adapter_weight)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        head=None,  # type: ignore[arg-type]
        device=torch.device("cpu"),
        source=resolve("debug:qwen3"),
    )
    Checkpointer(tmp_path, trainable_only=True, asynchronous=False).save(state, {})
    size = sum(path.stat().st_size for path in (tmp_path / "step-000000").rglob("*") if path.is_file())
    assert size <= 46 * 2**20
    assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values() if hasattr(v, "dtype"))

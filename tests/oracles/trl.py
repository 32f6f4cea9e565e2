"""TRL as the oracle of preference methods: its own trainers read rows of text, and make loss and gradients of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from luthier.hf.debug.tiny import debug_tokenizer

Found = tuple[float, dict[str, torch.Tensor]]
"""Loss, and gradients by name."""


def run(
    method: str, model: Any, reference: Any, rows: Sequence[dict[str, Any]], scratch: Path, **settings: Any
) -> Found:
    """TRL's loss on rows as one batch, and the gradients that it leaves in the model's parameters.

    Args:
        method: dpo, orpo, simpo or kto.
        model: an unmodified model that trains.
        reference: a frozen one (dpo, kto).
        rows: of text.
        scratch: a directory.
        settings: of TRL's config.
    """
    common: dict[str, Any] = {
        "output_dir": str(scratch),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "per_device_train_batch_size": len(rows),
        "gradient_checkpointing": False,
        "max_length": 256,
        "disable_tqdm": True,
        **settings,
    }
    tokenizer = debug_tokenizer()
    tokenizer.bos_token = None  # the tokenizer adds none by itself, and two of the trainers would
    data = {"train_dataset": Dataset.from_list(list(rows)), "processing_class": tokenizer}
    trainer: Any
    if method == "dpo":
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        trainer = DPOTrainer(model, ref_model=reference, args=DPOConfig(**common), **data)
    elif method == "kto":
        from trl.trainer.kto_config import KTOConfig
        from trl.trainer.kto_trainer import KTOTrainer

        trainer = KTOTrainer(model, ref_model=reference, args=KTOConfig(**common), **data)
    elif method == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer = ORPOTrainer(model, args=ORPOConfig(**common), **data)
    else:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        trainer = CPOTrainer(model, args=CPOConfig(loss_type="simpo", **common), **data)
    inputs = next(iter(trainer.get_train_dataloader()))
    model.zero_grad(set_to_none=True)
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

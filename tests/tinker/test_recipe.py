"""Two front doors, one step: a loop over the client equals the recipe on the same batches, bit for bit in fp32."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from luthier.batch import Batch
from luthier.config import RunConfig
from luthier.recipes.run import opened
from luthier.recipes.sft import take_step
from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig

DATA = Path(__file__).parents[2] / "examples" / "rows.jsonl"


def datums_of(microbatch: Batch, total_weight: float) -> list[Datum]:
    """The documents of a recipe's microbatch, weighted as the recipe weights them."""
    data = []
    for begin, end in itertools.pairwise(microbatch.cu_seqlens.tolist()):
        here = slice(begin, end)
        weights = microbatch.weights[0, here] * (1 / total_weight)
        targets = microbatch.targets[0, here]
        inputs = {"target_tokens": targets.where(weights != 0, -100), "weights": weights.float()}
        data.append(Datum(microbatch.input_ids[0, here], inputs))
    return data


def test_a_loop_in_process_equals_the_recipe_bit_for_bit(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": "debug:llama",
            "data": {"train": str(DATA), "sequence_length": 128},
            "adapter": {"rank": 4, "alpha": 32},
            "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup": 2},
            "train": {"steps": 3, "rows_per_step": 4, "precision": "fp32"},
            "output": str(tmp_path / "run"),
        }
    )
    client = LocalTrainingClient("debug:llama", LoraConfig(rank=4, train_unembed=False), precision="fp32")
    with opened(config, "never") as run:
        start = {name: p.detach().clone() for name, p in run.state.trainable.items()}
        assert all(torch.equal(start[name], p) for name, p in client.state.trainable.items())
        for batch in run.loader:
            for microbatch in batch.microbatches:  # the recipe's weights 1 / N
                client.forward_backward(datums_of(microbatch, batch.total_weight))
            measured = take_step(run, batch)
            adam = AdamParams(
                learning_rate=measured["learning_rate"],
                beta1=config.optimizer.betas[0],  # type: ignore[union-attr]
                beta2=config.optimizer.betas[1],  # type: ignore[union-attr]
                eps=config.optimizer.epsilon,  # type: ignore[union-attr]
                weight_decay=config.optimizer.weight_decay,
                grad_clip_norm=config.train.max_gradient_norm or 0.0,
            )
            assert client.optim_step(adam).result().metrics["gradient_norm:mean"] == measured["gradient_norm"]
        assert run.state.counters.step == 3
        ended = run.state.trainable
        assert ended.keys() == client.state.trainable.keys()
        assert all(torch.equal(ended[name], p) for name, p in client.state.trainable.items())
        assert not any(torch.equal(ended[name], start[name]) for name in ended)

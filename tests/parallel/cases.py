"""What tests of layouts share: rows, a run on every rank of a world, and its gradients as whole tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from torch.distributed.tensor import DTensor

from luthier.adapters.init import first_down
from luthier.batch import Batch, Sample
from luthier.config import LoraConfig, ParallelConfig
from luthier.config.sections import AdamWConfig, SGDConfig
from luthier.engine.build import build_state
from luthier.engine.evaluate import evaluate
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all, optim_step
from luthier.hf.source import resolve
from luthier.parallel.layout import Layout
from luthier.parallel.mesh import Mesh
from tests.oracles.plain import Reference, plain_model, weighted_sum
from tests.oracles.rows import documents


def reference(path: Path, model: Any = None) -> Reference:
    """What plain Transformers (or `model`) in one process makes of `documents()`, in float64."""
    samples = documents()
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    return weighted_sum(plain_model(path, torch.float64) if model is None else model, samples, factor)


def adapted_reference(
    path: Path, modules: Sequence[str], *, rank: int = 4, trained: Sequence[str] = (), fan_in_fan_out: bool = False
) -> Reference:
    """What PEFT makes of `documents()`, in float64, under our names, with adapters as of `ready` and `strengthen`.

    Args:
        path: of the model.
        modules: that carry adapters, last parts of their names.
        rank: of the adapters, whose alpha is twice that.
        trained: modules that are trained whole beside them.
        fan_in_fan_out: as of PEFT.
    """
    config = PeftLora(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(modules),
        modules_to_save=list(trained) or None,
        fan_in_fan_out=fan_in_fan_out,
    )
    peft = get_peft_model(plain_model(path, torch.float64), config, autocast_adapter_dtype=False)
    prefix = "base_model.model."
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            layer, _, end = name.removeprefix(prefix).partition(".lora_")
            if end.startswith("A"):
                parameter.copy_(first_down(rank, parameter.shape[1], layer, 0))
            elif end.startswith("B"):
                generator = torch.Generator().manual_seed(sum(layer.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    expected = reference(path, peft)
    expected.gradients = {
        name.removeprefix(prefix).replace(".modules_to_save", "").replace(".default", ""): gradient
        for name, gradient in expected.gradients.items()
    }
    return expected


def filed_reference(path: Path, config: PeftLora, directory: Path) -> Reference:
    """What PEFT makes of `documents()`, in float64, under our names, with adapters of random values.

    Args:
        path: of the model.
        config: of PEFT.
        directory: where the adapters are saved, for `LoraConfig.start_from`.
    """
    peft = get_peft_model(plain_model(path, torch.float64), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5)
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    peft.save_pretrained(str(directory), save_embedding_layers=False)
    expected = reference(path, peft)
    expected.gradients = {
        re.sub(
            r"\.lora_embedding_([AB])$",
            r".lora_\1.weight",
            name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", ""),
        ): gradient
        for name, gradient in expected.gradients.items()
    }
    return expected


def microbatches(samples: Sequence[Sample], part: int, parts: int, count: int = 2) -> list[Batch]:
    """`count` packed microbatches of this data rank's rows, whose weights are those of the whole global batch."""
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    own = samples[part::parts]
    return [Batch.pack(own[number::count]).scaled(factor) for number in range(count)]


@functools.cache
def one_mesh(layout: Layout, device: torch.device) -> Mesh:
    """One mesh for all cases of a layout: every group of it holds threads until its process ends."""
    return Mesh(layout, device)


def ready(
    path: Path | str,
    layout: dict[str, int],
    *,
    precision: str = "fp64",
    adapter: LoraConfig | None = None,
    seed: int = 0,
    **more: Any,
) -> TrainState:
    """A model on a layout; called on every rank. `more` are fields of `parallel`, or arguments of build_state."""
    fields = {name: more.pop(name) for name in list(more) if name in ParallelConfig.model_fields}
    device = torch.device("cpu")
    parallel = ParallelConfig(**layout, **fields)
    ranks = torch.distributed.get_world_size()
    mesh = one_mesh(Layout.resolve(parallel, ranks), device)
    return build_state(
        resolve(str(path)),
        adapter=adapter,
        optimizer=more.pop("optimizer", SGDConfig(name="sgd", learning_rate=0.1)),
        precision=precision,  # type: ignore[arg-type]
        device=device,
        mesh=mesh,
        parallel=parallel,
        seed=seed,
        **more,
    )


def strengthen(state: TrainState) -> None:
    """Give every lora_B values that do not depend on the layout: with zeros no gradient would reach lora_A."""
    from luthier.adapters.experts import adapted
    from luthier.hf.shards import fill

    for name, layer in adapted(state.model):
        up = layer.lora_B.weight
        generator = torch.Generator().manual_seed(sum(name.encode()))
        fill(up, torch.randn(up.shape, generator=generator, dtype=torch.float64).to(up.dtype) * 0.1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of what may be sharded; all ranks that share it call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def measure(
    path: Path | str, layout: dict[str, int], samples: Sequence[Sample], *, lora: LoraConfig | None = None, **how: Any
) -> dict[str, Any]:
    """Loss, gradients (whole, by name, of this rank's stage), norm and validation loss of one step on a layout."""
    state = ready(path, layout, adapter=lora, **how)
    if lora is not None and lora.start_from is None:
        strengthen(state)
    mesh = state.mesh
    assert mesh is not None
    batches = microbatches(samples, mesh.data_rank, mesh.data_ranks)
    measured = evaluate(state, [batch.scaled(1.0) for batch in batches])
    state.model.train()
    outputs = forward_backward_all(state, batches)
    loss = float(mesh.sum(torch.stack([output.loss for output in outputs]).sum()))
    from luthier.parallel.norm import settle

    settle(state.trainable.values())
    if state.pipeline is not None:
        state.pipeline.settle()
    gradients = {name: whole(p.grad) for name, p in state.trainable.items() if p.grad is not None}
    missing = [name for name, p in state.trainable.items() if p.grad is None]
    update = optim_step(state, loss=loss)
    return {
        "loss": loss,
        "gradients": gradients,
        "missing": missing,
        "norm": update.gradient_norm,
        "logprobs": [output.logprobs for output in outputs],
        "validation": measured.loss,
        "lora": str(state.lora),
        "parameters": state.parameters,
    }


def weights_after(early: bool) -> dict[str, torch.Tensor]:
    """Whole weights and the last norm after two steps of AdamW on dp_shard 2, updated in the backward pass or after."""
    optimizer = AdamWConfig(in_backward=early)
    state = ready("debug:llama", {"dp_shard": 2}, precision="fp32", optimizer=optimizer)
    mesh = state.mesh
    assert mesh is not None
    norm = 0.0
    for _ in range(2):
        outputs = forward_backward_all(state, microbatches(documents(), mesh.data_rank, mesh.data_ranks))
        loss = float(mesh.sum(torch.stack([output.loss for output in outputs]).sum()))
        norm = optim_step(state, loss=loss).gradient_norm
    return {name: whole(p.detach()) for name, p in state.trainable.items()} | {"norm": torch.tensor(norm)}

"""Clients over tiny models with large weights, and the plain loop that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from luthier.tinker import Datum, LocalTrainingClient, LoraConfig, ModelInput, apply_lora, iter_lora_modules
from tests.adapters.models import VOCABULARY, disturb, tiny

LENGTHS = (9, 4, 12, 6, 3)


def client_of(
    kind: str = "gpt2", dtype: torch.dtype = torch.float64, rank: int = 4, **options: Any
) -> LocalTrainingClient:
    """A client whose adapters are not zero; always the same. GPT-2 rounds nothing to fp32 inside."""
    model = tiny(kind, dtype)
    apply_lora(model, LoraConfig(rank=rank, train_unembed=options.pop("train_unembed", True)))
    disturb(model)
    for _, layer in iter_lora_modules(model):
        layer.lora_B.weight.data = layer.lora_B.effective.detach()
    return LocalTrainingClient(model, **options)


def make_data(seed: int = 0, lengths: Sequence[int] = LENGTHS, **fields: str) -> list[Datum]:
    """Datums with targets, and further fields: "weights" any numbers and 0, "ratio" logprobs near the model's."""
    generator = torch.Generator().manual_seed(seed)

    def number(kind: str, length: int) -> torch.Tensor:
        if kind == "mask":
            return (torch.rand(length, generator=generator) > 0.3).double()
        values = torch.randn(length, generator=generator, dtype=torch.float64)
        if kind == "weights":
            values[::4] = 0
        return values - 4.0 if kind == "logprobs" else values

    data = []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        inputs = {"target_tokens": ids[1:], **{key: number(kind, length) for key, kind in fields.items()}}
        data.append(Datum(ModelInput.from_ints(ids[:-1].tolist()), inputs))
    return data


def gradients(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in client.state.trainable.items() if p.grad is not None}


def plain_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    """[T] or [T, K] from the model's own forward on one document, differentiable."""
    ids = torch.tensor([datum.model_input.to_ints()])
    targets = torch.as_tensor(datum.loss_fn_inputs["target_tokens"])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    found = logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1).clamp(min=0))
    return found.reshape(targets.shape)


def plain_gradients(
    model: Any, data: Sequence[Datum], loss: Callable[[Datum, torch.Tensor], torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """A loop over documents, one forward and backward pass each."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for datum in data:
        value = loss(datum, plain_logprobs(model, datum))
        value.backward()
        total += value.item()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total, found


def plain_twin(client: LocalTrainingClient, kind: str = "gpt2") -> Any:
    """A model of plain Transformers and PEFT with the same weights and adapters, whose parameters carry our names."""
    import peft

    layers = dict(iter_lora_modules(client.model))
    config = peft.LoraConfig(
        r=1,
        target_modules=list(layers),
        rank_pattern={name: layer.lora_spec.rank for name, layer in layers.items()},
        alpha_pattern={name: layer.lora_spec.alpha for name, layer in layers.items()},
    )
    wrapped = peft.get_peft_model(tiny(kind, client.model.dtype), config, autocast_adapter_dtype=False)
    ours = dict(client.model.named_parameters())
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(ours[plain_name(name)])
    for name, layer in layers.items():
        if layer.lora_B.mask is not None:  # PEFT has no such thing, so its gradient is cut
            up = wrapped.base_model.model.get_submodule(name).lora_B["default"].weight
            up.register_hook(lambda gradient, mask=layer.lora_B.mask: gradient * mask)
    return wrapped.eval()


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")

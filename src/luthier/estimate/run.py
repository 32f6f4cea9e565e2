"""`luthier estimate`: a run's parameters, operations and memory."""

from __future__ import annotations

from typing import Any

from luthier.adapters import apply_lora, is_adapter_weight
from luthier.adapters.structure import settle_ties
from luthier.config import RunConfig
from luthier.engine.build import DTYPES, choose_device, choose_precision
from luthier.estimate.memory import count_memory
from luthier.hf.anatomy import describe
from luthier.hf.load import build_on_meta, model_class
from luthier.hf.source import load_config, resolve
from luthier.optim.build import build_optimizer
from luthier.report.flops import count_flops
from luthier.report.progress import amount


def estimate(config: RunConfig) -> dict[str, Any]:
    """Say what a run takes. Nothing but the model's `config.json` is read, no weight and no row.

    Operations are those of a document that fills `data.sequence_length`, with every position in the loss: the most that
    a token can take. A microbatch holds one such document, or a longest row.

    Args:
        config: of the run; data may be empty.

    Returns:
        model, adapter (a line, or None), precision; parameters {total, trainable}; flops {token_forward,
        token_backward, token, step, run}; memory in bytes {weights, gradients, optimizer, activations, logits, total}.

    Raises:
        ModelError: the model's config cannot be found or read.
    """
    source = resolve(config.model, revision=config.revision)
    trust = config.trust_remote_code
    own = load_config(source, trust_remote_code=trust)
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    model: Any = build_on_meta(model_class(source, own, trust_remote_code=trust), own)
    for parameter in model.parameters():  # not the buffers: rope's frequencies stay fp32
        parameter.data = parameter.data.to(DTYPES[precision])
    line = None
    if config.adapter is not None:
        line = str(apply_lora(model, config.adapter, config.seed))
    _tie(model)
    anatomy = describe(model)
    inside = tuple(f"{layer}." for layer in anatomy.layers)
    optimizer = build_optimizer(
        model.named_parameters(),
        config.optimizer,
        adapters=is_adapter_weight,
        hidden_matrices=lambda name: name.startswith(inside),
    )
    parameters = list(model.parameters())
    length = config.data.sequence_length
    flops = count_flops(model)
    forward, backward = flops.forward([length], length), flops.backward([length], length)
    token = (forward + backward) / length
    tokens = config.train.tokens_per_step or (config.train.rows_per_step or 16) * length
    steps = config.train.steps
    memory = count_memory(model, optimizer, length, checkpointing=config.train.activation_checkpointing)
    return {
        "model": config.model,
        "architecture": type(model).__name__,
        "adapter": line,
        "precision": precision,
        "sequence_length": length,
        "parameters": {
            "total": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        },
        "flops": {
            "token_forward": round(forward / length),
            "token_backward": round(backward / length),
            "token": round(token),
            "step": round(token * tokens),
            "run": round(token * tokens * steps) if steps is not None else None,
        },
        "memory": memory.to_dict(),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """An estimate for people."""
    parameters, flops, memory = result["parameters"], result["flops"], result["memory"]
    share = parameters["trainable"] / parameters["total"]
    text = [
        f"{result['model']}: {result['architecture']}, {parameters['total']:,} parameters, "
        f"{parameters['trainable']:,} trainable ({share:.2%}), {result['precision']}",
        *([result["adapter"]] if result["adapter"] else []),
        f"operations a token   {amount(flops['token_forward'], 'FLOP')} forward, "
        f"{amount(flops['token_backward'], 'FLOP')} backward, in rows of {result['sequence_length']:,} tokens",
        f"operations a step    {amount(flops['step'], 'FLOP')}",
    ]
    if flops["run"] is not None:
        text.append(f"operations in all    {amount(flops['run'], 'FLOP')}")
    text += [f"memory, {name:<12} {amount(count, 'B'):>10}" for name, count in memory.items()]
    return text


def _tie(model: Any) -> None:
    """Alias what loading would alias; on meta each weight still stands alone."""
    settle_ties(model)
    for target, owner in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(owner))

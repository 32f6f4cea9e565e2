"""The load-balancing loss against Transformers' function and autograd."""

from __future__ import annotations

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from luthier.losses.load_balancing import Load, logits_gradient

LAYERS = [torch.randn(11, 6, generator=torch.Generator().manual_seed(layer)) for layer in range(3)]
COUNTED = torch.tensor([True, True, False, True, True, True, False, True, True, True, False])


def test_value_is_transformers() -> None:
    for mask in (COUNTED, torch.ones(11, dtype=torch.bool)):
        load = sum((Load.of(logits, mask, 2) for logits in LAYERS[1:]), start=Load.of(LAYERS[0], mask, 2))
        theirs = load_balancing_loss_func(tuple(LAYERS), 6, 2, mask[None].long())
        assert abs(float(load.loss) - float(theirs)) < 1e-6


def test_gradient_is_transformers_when_the_batch_comes_in_pieces() -> None:
    logits = [layer.double().requires_grad_() for layer in LAYERS]
    load_balancing_loss_func(tuple(logits), 6, 2, COUNTED[None].long()).backward()
    pieces = [(layer[part], COUNTED[part]) for layer in LAYERS for part in (slice(4), slice(4, 11))]
    loads = [Load.of(piece, mask, 2) for piece, mask in pieces]
    whole = Load.unflat(torch.stack([load.flat() for load in loads]).sum(0))
    for layer, expected in zip(LAYERS, logits, strict=True):
        found = logits_gradient(layer.double(), COUNTED, whole.slopes)
        assert expected.grad is not None
        assert (found - expected.grad).abs().max() < 1e-7 * expected.grad.abs().max()
        assert not found[~COUNTED].any()


def test_nothing_counted() -> None:
    load = Load.of(LAYERS[0], torch.zeros(11, dtype=torch.bool), 2)
    assert load.loss == 0
    assert not load.slopes.any()

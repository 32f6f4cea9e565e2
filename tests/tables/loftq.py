"""The row of LoftQ: PEFT factorises in float32 alone, so what it begins with is compared to that, and everything else
in float64. Nothing is widened, since bitsandbytes knows no float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from peft.tuners.lora import layer as pefts_layers
from torch import Tensor

from luthier.adapters import adapted, merge, save_peft
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all
from luthier.hf.debug.tiny import debug_config
from tests.adapters.test_gradients import plain as our_name
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.quantised import dequantised, pefts_loftq
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches, strengthen
from tests.tables import adapters as table
from tests.world import World


def parity(method: table.Method, directory: Path, world: Callable[[int], World]) -> dict[str, float | str]:
    """As `tests.tables.adapters.parity`."""
    base = save_strong(debug_config(method.model, **method.changes), directory / "base")
    beside = dequantised(base, directory / "dequantised", double=method.config().double_quantize)
    with mock.patch.object(pefts_layers, "loftq_init", pefts_loftq()):
        theirs: Any = peft.get_peft_model(plain_model(base, torch.float64), method.peft).eval().double()
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's example has it
    samples = documents()
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    files = method.from_files(directory / "theirs")
    found: dict[str, float | str] = {}

    def gradients(state: TrainState) -> dict[str, Tensor]:
        forward_backward_all(state, microbatches(samples, 0, 1))
        return {name: p.grad for name, p in state.trainable.items() if p.grad is not None}

    def on(layout: dict[str, int]) -> float:
        ranks = world(2).run(table.widened, base, layout, method.config())
        alone = table.ready(base, method.config())
        strengthen(alone)
        return max(gradient_error(rank["gradients"], gradients(alone)) for rank in ranks)

    state, twin = table.ready(base, method.config()), table.ready(base, method.config())
    expected = weighted_sum(theirs, samples, factor)
    found["forward"] = table.relative(table.ours(state), table.of_trained(expected.logprobs))
    table.put(twin.model, {our_name(name): p.detach() for name, p in theirs.named_parameters() if p.requires_grad})
    found["gradients"] = gradient_error(gradients(twin), {our_name(n): g for n, g in expected.gradients.items()})
    for model in (state.model, theirs):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.25)
    before = table.ours(state)
    save_peft(state.model, directory / "ours")
    again = peft.PeftModel.from_pretrained(
        plain_model(beside, torch.float64), str(directory / "ours"), is_trainable=True, autocast_adapter_dtype=False
    )
    found["saves"] = table.relative(table.said(again.eval()), before)
    theirs.save_pretrained(str(directory / "theirs"))
    found["loads"] = table.relative(table.ours(table.ready(base, files)), table.said(theirs))
    for name, layout in table.LAYOUTS.items():
        found[name] = table.cell(method, name, lambda layout=layout: on(layout))  # type: ignore[misc]
    merge(state.model)
    assert not list(adapted(state.model))
    found["merges"] = table.relative(table.ours(state), before)
    return found

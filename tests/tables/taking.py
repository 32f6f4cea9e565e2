"""The row of a method that takes a part out of the base weight (PiSSA, OLoRA): PEFT makes it in float32 alone, so what
it begins with is compared to that, and everything else in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from luthier.adapters import adapted, merge, save_peft
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all
from luthier.hf.debug.tiny import debug_config
from luthier.verify.reference import widening
from tests.adapters.test_gradients import plain as our_name
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.rows import documents
from tests.parallel.cases import microbatches, strengthen
from tests.tables import adapters as table
from tests.world import World


def parity(method: table.Method, directory: Path, world: Callable[[int], World]) -> dict[str, float | str]:
    """As `tests.tables.adapters.parity`."""
    base = save_strong(debug_config(method.model, **method.changes), directory / "base")
    theirs = begun(method, base)
    initial = str(directory / "first")
    theirs.peft_config["default"].init_lora_weights = True  # as PEFT's guide has it
    theirs.save_pretrained(initial)
    theirs.peft_config["default"].init_lora_weights = method.config().init
    with widening():
        return _parity(method, base, theirs.double(), directory, world)


def _parity(
    method: table.Method, base: Path, theirs: Any, directory: Path, world: Callable[[int], World]
) -> dict[str, float | str]:
    samples = documents()
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)

    def gradients(state: TrainState) -> dict[str, Tensor]:
        forward_backward_all(state, microbatches(samples, 0, 1))
        found = {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}
        state.model.zero_grad()
        return found

    def opened(files: Path) -> Any:
        fresh = plain_model(base, torch.float64)
        return peft.PeftModel.from_pretrained(fresh, str(files), is_trainable=True, autocast_adapter_dtype=False).eval()

    state = table.ready(base, method.config())
    expected = weighted_sum(theirs, samples, factor)
    found: dict[str, float | str] = {"forward": table.relative(table.ours(state), table.of_trained(expected.logprobs))}
    named = {our_name(name): gradient for name, gradient in expected.gradients.items()}
    twin = table.ready(base, method.config())
    table.put(twin.model, {our_name(name): p.detach() for name, p in theirs.named_parameters()})
    found["gradients"] = gradient_error(gradients(twin), named)
    for model in (state.model, theirs):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.25)
    save_peft(state.model, directory / "ours")
    found["saves"] = table.relative(table.said(opened(directory / "ours")), table.ours(state))
    changed = table.said(theirs)
    with warnings.catch_warnings():  # that two adapters which both changed the base are not to be used together
        warnings.simplefilter("ignore")
        theirs.save_pretrained(
            str(directory / "theirs"), path_initial_model_for_weight_conversion=str(directory / "first")
        )
    found["loads"] = table.relative(table.ours(table.ready(base, method.from_files(directory / "theirs"))), changed)
    alone = table.ready(base, method.config())
    strengthen(alone)
    single = gradients(alone)
    for name, layout in table.LAYOUTS.items():
        ranks = world(2).run(table.widened, base, layout, method.config())
        found[name] = max(gradient_error(rank["gradients"], single) for rank in ranks)
    before = table.ours(state)
    merge(state.model)
    assert not list(adapted(state.model))
    found["merges"] = table.relative(table.ours(state), before)
    return found


def begun(method: table.Method, base: Path) -> Any:
    """PEFT's model as it begins, singular vectors with our signs."""
    theirs = peft.get_peft_model(plain_model(base, torch.float32), method.peft).eval()
    with torch.no_grad():
        for module in theirs.modules():
            if getattr(module, "lora_B", None) and method.config().init != "olora":
                up, down = module.lora_B.default.weight, module.lora_A.default.weight
                signs = up.gather(0, up.abs().argmax(0, keepdim=True)).sign()
                up.mul_(signs)
                down.mul_(signs.t())
    return theirs

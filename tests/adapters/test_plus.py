"""LoRA+ against PEFT's optimizer over some steps."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from luthier.adapters import apply_lora, is_adapter_weight, learning_rates
from luthier.config import LoraConfig
from luthier.config.sections import AdamWConfig, MuonConfig, SGDConfig
from luthier.engine.build import build_state
from luthier.hf.source import resolve
from luthier.optim.build import build_optimizer
from tests.adapters.models import PEFT_WARNINGS, disturb, loss, relative, tiny
from tests.adapters.test_gradients import TARGETS, plain

pytestmark = list(PEFT_WARNINGS)


def pair(config: LoraConfig) -> tuple[Any, Any]:
    ours = tiny("llama")
    apply_lora(ours, config)
    disturb(ours)
    other = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=TARGETS["llama"],
        use_dora=config.dora,
        modules_to_save=["model.norm"] if config.train_modules else None,
    )
    theirs = peft.get_peft_model(tiny("llama"), other, autocast_adapter_dtype=False)
    values = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(values[plain(name)])
    return ours, theirs


@pytest.mark.parametrize(
    ("rule", "decay", "more"),
    [
        ("sgd", 0.0, {"dora": True, "train_modules": ["norm"]}),
        ("adamw", 0.0, {"dora": True, "train_modules": ["norm"]}),
        ("adamw", 0.1, {}),  # PEFT would decay lengths and norms too
    ],
)
def test_steps_equal_pefts(rule: str, decay: float, more: dict[str, Any]) -> None:
    config = LoraConfig(rank=4, alpha=6, target=TARGETS["llama"], learning_rate_ratio=16, **more)
    ours, theirs = pair(config)
    made: Any = SGDConfig(name="sgd", learning_rate=1e-2)
    how: dict[str, Any] = {}
    if rule == "adamw":
        made, how = AdamWConfig(learning_rate=1e-3, weight_decay=decay), {"loraplus_weight_decay": decay}
    kind = torch.optim.SGD if rule == "sgd" else torch.optim.AdamW
    one = build_optimizer(ours.named_parameters(), made, adapters=is_adapter_weight, rates=learning_rates(ours, config))
    other = create_loraplus_optimizer(theirs, kind, lr=made.learning_rate, loraplus_lr_ratio=16, **how)
    for _ in range(4):
        for model, optimizer in ((ours, one), (theirs, other)):
            model.zero_grad()
            loss(model).backward()
            optimizer.step()
    values = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            key = plain(name).replace(".modules_to_save", "")
            assert relative(values[key], parameter) < 1e-10, name


def test_a_run_has_the_rates_of_its_adapter() -> None:
    def rates(optimizer: Any, **options: Any) -> set[float]:
        adapter = LoraConfig(rank=4, **options)
        how: Any = {"adapter": adapter, "precision": "fp32", "device": torch.device("cpu")}
        state = build_state(resolve("debug:llama"), optimizer=optimizer, **how)
        return {round(group["initial_lr"], 9) for group in state.optimizer.param_groups}

    assert rates(AdamWConfig(learning_rate=1e-3), learning_rate_ratio=8) == {1e-3, 8e-3}
    assert rates(AdamWConfig(learning_rate=1e-3)) == {1e-3}
    muon = MuonConfig(name="muon", learning_rate=1e-3, adamw_learning_rate=1e-4)
    assert rates(muon, learning_rate_ratio=8) == {1e-3, 8e-3}

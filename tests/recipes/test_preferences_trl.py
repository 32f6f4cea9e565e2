"""Each preference method makes TRL's loss and gradients of the same rows, which TRL's own trainer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from luthier.hf.debug.tiny import debug_config
from tests.oracles import trl
from tests.oracles.plain import gradient_error, plain_model, save_strong
from tests.recipes.preferences import LABELLED, PAIRS, config_of, double, one_step

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

TOLERANCE = 1e-5
"""TRL's head works in fp32 whatever the model's dtype is."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that trains and one that is the reference."""
    place = tmp_path_factory.mktemp("models")
    return tuple(save_strong(debug_config("llama"), place / str(seed), seed=seed) for seed in (0, 1))  # type: ignore[return-value]


DPO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"beta": 0.1}, {"beta": 0.1}),
    ({"beta": 0.3}, {"beta": 0.3}),
    ({"loss": "ipo"}, {"loss_type": ["ipo"]}),
    ({"loss": "hinge"}, {"loss_type": ["hinge"]}),
    ({"loss": "robust", "label_smoothing": 0.1}, {"loss_type": ["robust"], "label_smoothing": 0.1}),
    ({"cross_entropy": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
]


def compare(
    method: dict[str, Any], settings: dict[str, Any], models: tuple[Path, Path], scratch: Path
) -> tuple[float, float]:
    """Relative difference of the losses, and of the worst tensor's gradient."""
    path, other = models
    labelled = method["name"] == "kto"
    # of labelled answers each carries the one before it, and TRL's first that of the last
    rows = [LABELLED[5], *LABELLED[:6]] if labelled else PAIRS[:6]
    wanted, expected = trl.run(
        "kto" if labelled else method["name"],
        plain_model(path, torch.float64),
        plain_model(other, torch.float64),
        LABELLED[:6] if labelled else PAIRS[:6],
        scratch,
        **settings,
    )
    first = 1 if labelled else 0
    with double():
        measured, gradients = one_step(
            config_of(path, rows, scratch, method), [[first, first + 1, first + 4], [first + 5, first + 2, first + 3]]
        )
    return abs(measured["loss"] - wanted) / abs(wanted), gradient_error(gradients, expected)


@pytest.mark.parametrize(("method", "settings"), DPO, ids=lambda value: "-".join(map(str, value.values())))
def test_dpo(method: dict[str, Any], settings: dict[str, Any], models: tuple[Path, Path], tmp_path: Path) -> None:
    asked = {"name": "dpo", "reference": str(models[1])} | method
    loss, gradient = compare(asked, settings, models, tmp_path)
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ({"name": "orpo", "beta": 0.2, "train_on_prompt": True}, {"beta": 0.2}),
        ({"name": "simpo", "gamma": 0.7}, {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}),
        ({"name": "simpo", "cross_entropy": 0.5}, {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.5}),
    ],
    ids=["orpo", "simpo", "simpo with cross-entropy"],
)
def test_without_a_reference(
    method: dict[str, Any], settings: dict[str, Any], models: tuple[Path, Path], tmp_path: Path
) -> None:
    loss, gradient = compare(method, settings, models, tmp_path)
    assert loss < TOLERANCE
    assert gradient < TOLERANCE


def test_kto(models: tuple[Path, Path], tmp_path: Path) -> None:
    method = {"name": "kto", "reference": str(models[1]), "desirable_weight": 1.3, "undesirable_weight": 0.7}
    settings = {"desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.1}
    loss, gradient = compare(method, settings, models, tmp_path)
    assert loss < TOLERANCE
    assert gradient < TOLERANCE

"""`luthier combine` reads weights beside directories, and says what it made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.adapters import apply_lora, save_peft
from luthier.cli.main import main
from luthier.config import LoraConfig
from tests.adapters.models import disturb, tiny


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    found = []
    for name in ("a=b", "c"):
        model = tiny("llama")
        apply_lora(model, LoraConfig(rank=2, target=["q_proj"]))
        disturb(model)
        found.append(str(save_peft(model, tmp_path / name)))
    return found


def test_weights_stand_beside_directories(parts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["combine", f"{parts[0]}=0.5", parts[1], "--output", str(tmp_path / "all"), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [part["weight"] for part in told["parts"]] == [0.5, 1.0]
    assert (told["layers"], told["rank"]) == (2, 4)
    assert main(["combine", *(f"{part}=1" for part in parts), "--output", str(tmp_path / "all")]) == 0
    assert "cat of 2 adapters: 2 layers, rank 4" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--method", "mean"], "'mean' is no method; take cat, svd"),
        (["--sign", "odd"], "'odd' is not total or frequency"),
        (["--density", "0.5"], "cat keeps all entries"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(
    parts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(["combine", *(f"{part}=1" for part in parts), "--output", str(tmp_path / "all"), *more]) == 2
    assert said in capfd.readouterr().err
    assert main(["combine", f"{parts[1]}=much", "--output", str(tmp_path / "all")]) == 2
    assert "'much' is no number" in capfd.readouterr().err

"""The registry of engines, and Luthier's own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from luthier.errors import ConfigError
from luthier.jobs.engines import engine, engines
from tests.jobs.own_engine import Echo


def test_engines_have_names() -> None:
    assert {"luthier", "huggingface"} <= set(engines())
    assert engine("luthier").command(Path("run.yaml")) == [sys.executable, "-m", "luthier", "train", "run.yaml"]


def test_an_engine_of_ones_own_is_named_with_its_module() -> None:
    assert isinstance(engine("tests.jobs.own_engine:echo"), Echo)
    assert isinstance(engine("echo"), Echo)  # where the module has been imported


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lutier", 'engine: there is no engine "lutier"; use one of .*luthier.*, or name one as module:name'),
        ("tests.jobs.own_engine:ech", 'engine: there is no engine "tests.jobs.own_engine:ech"; use one of .*'),
        (  # not ours of that name
            "tests.jobs.own_engine:luthier",
            'engine: there is no engine "tests.jobs.own_engine:luthier"; use one of .*',
        ),
        ("no_such.module:x", "engine: there is no module no_such; check its name"),
    ],
)
def test_an_engine_that_is_not_there(name: str, message: str) -> None:
    engine("luthier")
    with pytest.raises(ConfigError, match=f"^{message}$"):
        engine(name)


def test_luthier_refuses_what_is_no_run() -> None:
    good = {"model": "debug:llama", "data": {"train": [{"path": "x.jsonl"}]}}
    engine("luthier").check(good)
    with pytest.raises(ConfigError) as error:
        engine("luthier").check({**good, "train": {"stepz": 3, "steps": -1}, "seed": "x"})
    lines = str(error.value).splitlines()
    assert [re.split(": ", line)[0] for line in lines] == ["config.train.steps", "config.train.stepz", "config.seed"]

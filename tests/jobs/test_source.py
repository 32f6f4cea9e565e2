"""What travels of a function is the function. Oracle: what it gives where it was written."""

from __future__ import annotations

import importlib.util

import pytest

from luthier.errors import ConfigError
from luthier.jobs import CustomTrainer

TRAVELS = """\
def even():
    text = '''one
  \t
    two'''
    line, feed = "\u2028", 1
\x0c
    return text, line, feed

def around():
    def inner():
        text = '''one
            two'''
        return text
    return inner

inner = around()
"""
LEANS = """\
open = print
from math import pow

def reads():
    return open("rows"), pow(2, 3)

def make(steps, key):
    def train(count=steps, by=lambda row: row[key]):
        pass
    return train

train = make(3, "length")
"""


def module_of(path, text):
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["even", "inner"])
def test_source_travels_letter_by_letter(client, tmp_path, name):
    """Oracle: what the function gives here. Blank lines and margins of a text are its own; U+2028 ends no line."""
    function = getattr(module_of(tmp_path / "travels.py", TRAVELS), name)
    scope: dict[str, object] = {}
    exec(client.train(trainer=CustomTrainer(function), dry_run=True).function.source, scope)
    assert scope[name]() == function()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("reads", "uses open, pow of the module around it, which does not travel along"),
        ("train", "uses key, steps of the function around it, which does not travel along"),
    ],
)
def test_what_only_looks_built_in_or_is_a_default_from_around_is_refused(client, tmp_path, name, told):
    with pytest.raises(ConfigError, match=f"trainer.func: {told}"):
        client.train(trainer=CustomTrainer(getattr(module_of(tmp_path / "leans.py", LEANS), name)), dry_run=True)


def test_a_file_that_was_edited_since_is_noticed(client, tmp_path):
    module = module_of(tmp_path / "edited.py", "def first():\n    pass\n")
    (tmp_path / "edited.py").write_text("def second():\n    return 2\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match="the source of first cannot be found: second is where it was; import it anew"
    ):
        client.train(trainer=CustomTrainer(module.first), dry_run=True)

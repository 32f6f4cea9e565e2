"""Groups of processes survive one that raises, ends, or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from luthier.verify.group import Failed, Group, Refused


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.chdir(Path(__file__).parents[2])
    with Group("tests.verify.answering", ranks=2, log=tmp_path / "log", timeout=1.0) as started:
        yield started


def test_all_get_a_call_and_live_on(group: Group) -> None:
    first = group.call("hello")
    assert first["rank"] == 0
    assert group.call("hello")["pid"] == first["pid"]


@pytest.mark.parametrize(
    ("call", "told"), [("hang", "no answer within 1 seconds"), ("die", "rank 1 ended with code 3")]
)
def test_one_that_is_lost_costs_a_call_and_no_more(group: Group, call: str, told: str) -> None:
    before = group.call("hello")["pid"]
    with pytest.raises(Failed, match=told):
        group.call(call, rank=1)
    assert group.call("hello")["pid"] != before


def test_one_that_raises_has_its_trace_told(group: Group) -> None:
    with pytest.raises(Failed, match="ValueError: no") as caught:
        group.call("raise", rank=1)
    assert caught.value.trace == "a trace"
    assert group.call("hello")["rank"] == 0


def test_a_refusal_of_all_is_one_and_that_of_some_is_a_fault(group: Group) -> None:
    before = group.call("hello")["pid"]
    with pytest.raises(Refused, match="it has no heads"):
        group.call("refuse")
    assert group.call("hello")["pid"] == before
    with pytest.raises(Failed, match="only some ranks refused"):
        group.call("refuse", rank=0)

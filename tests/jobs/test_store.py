"""The store by itself, and specs on their way through it."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from luthier.errors import UserError
from luthier.jobs.spec import Function, JobSpec, Transfer
from luthier.jobs.store import JobStore, home_directory
from luthier.jobs.types import COMPLETE, CREATED, FAILED, RUNNING, SUSPENDED
from luthier.jobs.wire import described, packed, unpacked

SECRET = "s3cret"
SPEC = JobSpec(
    name="one",
    runtime="luthier",
    framework="luthier",
    num_nodes=2,
    nproc_per_node=3,
    engine="luthier",
    config={"train": {"steps": 5, "epochs": None}, "seed": 0, "packing": False, "text": "a = 'b'\u2028"},
    function=Function("def f(): pass", "f", {"a": [], "b": 0.0}, ("x",), (f"https://me:{SECRET}@host",)),
    command=("sh", "-c", ""),
    files={"own/x.py": f"KEY = {SECRET!r}\n"},
    env={"KEY": SECRET, "EMPTY": ""},
    resources_per_node={"gpu": 0},
    dataset=Transfer({"STORAGE_URI": "hf://a/b"}, {"ACCESS_TOKEN": SECRET}),
    exporter=Transfer({}),
    runtime_patches=({"a": 1},),
)


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(tmp_path / "home")


def add(store: JobStore, *names: str) -> None:
    for name in names:
        store.add(name.upper(), JobSpec(name, "r", "torch", command=("true",)), 0)


def test_a_spec_reaches_its_supervisor_whole() -> None:
    assert unpacked(packed(SPEC)) == SPEC


def test_a_spec_is_kept_without_its_secrets(store: JobStore) -> None:
    store.add("U", SPEC, 0)
    job = store.find("one")
    assert job is not None
    assert job.spec == json.loads(json.dumps(described(SPEC)))
    assert job.spec["dataset"] == {"env": {"STORAGE_URI": "hf://a/b"}, "secrets": ["ACCESS_TOKEN"]}
    assert (job.spec["env"], job.spec["files"]) == (["EMPTY", "KEY"], ["own/x.py"])
    with sqlite3.connect(store.path) as connection:
        assert SECRET not in "\n".join(connection.iterdump())
    connection.close()


def test_steps_are_in_their_order(store: JobStore) -> None:
    store.add("U", SPEC, 2)
    job = store.find("one")
    assert job is not None
    assert [(step.name, step.status, step.devices) for step in job.steps] == [
        ("dataset-initializer", CREATED, 0), ("node-0", CREATED, 2), ("node-1", CREATED, 2), ("exporter", CREATED, 0),
    ]  # fmt: skip


def test_turns_come_one_after_the_other(store: JobStore) -> None:
    add(store, "a", "b", "c")
    assert [store.take_turn(uid, 2) for uid in "BCA"] == [False, False, True]
    assert [store.take_turn(uid, 2) for uid in "CB"] == [False, True]
    assert not store.take_turn("C", 2)
    store.set_status("A", COMPLETE, "")
    assert store.take_turn("C", 2)


def test_a_suspended_job_goes_to_the_end_of_the_line(store: JobStore) -> None:
    add(store, "a", "b", "c")
    store.set_status("A", SUSPENDED, "")
    store.line_up("A")
    assert [store.take_turn(uid, 9) for uid in "ACBCA"] == [False, False, True, True, True]


def test_whoever_is_to_stop_is_passed_over(store: JobStore) -> None:
    add(store, "a", "b")
    store.wish("A", "delete")
    store.wish("A", "run")  # too late
    assert store.take_turn("B", 1)
    assert [job.wish for job in store.list()] == ["delete", "run"]


def test_an_end_is_an_end(store: JobStore) -> None:
    add(store, "a")
    store.take_turn("A", 1)
    store.step_started("A", "node-0", 7)
    store.set_status("A", FAILED, "why")
    store.set_status("A", RUNNING, "")
    job = store.get("A")
    assert job is not None
    assert (job.status, job.message, job.steps[0].status) == (FAILED, "why", FAILED)
    assert job.steps[0].ended is not None
    assert [(event.step, event.reason) for event in store.events("A")] == [
        (None, "Submitted"), (None, "Running"), ("node-0", "Started"), (None, "Failed"),
    ]  # fmt: skip


def test_nothing_is_left_of_a_job_that_is_removed(store: JobStore) -> None:
    add(store, "a", "b")
    store.remove("A")
    assert store.get("A") is None
    assert store.events("A") == []
    add(store, "a")
    assert [job.name for job in store.list()] == ["b", "a"]


def test_a_name_is_taken_once(store: JobStore) -> None:
    add(store, "a")
    with pytest.raises(UserError, match=r"^a: there is a job of this name already; delete it, or choose another"):
        store.add("OTHER", replace(SPEC, name="a"), 0)
    assert store.get("OTHER") is None


def test_a_watch_sees_what_others_change(store: JobStore) -> None:
    with store.watch() as watch:
        assert watch.changed()
        assert not watch.changed()
        add(JobStore(store.home), "a")
        assert watch.changed()
        assert not watch.changed()


def test_a_store_of_another_version_is_left_alone(store: JobStore) -> None:
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(
        UserError, match=r"jobs.sqlite3: was written by another version of Luthier \(format 99, not 1\)"
    ):
        JobStore(store.home)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite3").write_text("not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(UserError, match=r"jobs.sqlite3: cannot be used \(file is not a database\); set LUTHIER_HOME"):
        JobStore(tmp_path)


def test_where_the_home_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LUTHIER_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert home_directory() == tmp_path / ".local" / "share" / "luthier"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert home_directory() == Path("/data/luthier")
    monkeypatch.setenv("LUTHIER_HOME", "~/jobs")
    assert home_directory() == tmp_path / "jobs"
    assert home_directory("/chosen") == Path("/chosen")
    monkeypatch.delenv("LUTHIER_HOME")
    monkeypatch.setattr("sys.platform", "darwin")
    assert home_directory() == tmp_path / "Library" / "Application Support" / "luthier"

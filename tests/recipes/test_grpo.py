"""GRPO runs learn, resume bit for bit, count what they leave out, and name what is wrong with a reward."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from luthier.config import RunConfig
from luthier.errors import ConfigError, DataError
from luthier.hf.gather import local_part
from luthier.launch import FIRST_STEP_TIMEOUT, STEP_TIMEOUT, set_timeout
from luthier.recipes import grpo
from luthier.recipes.dry_run import dry_run
from luthier.recipes.rewards import call_reward, load_rewards
from luthier.recipes.rollout import Group
from tests.recipes.test_train import assert_same_end

REWARDS = """
def short(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]

def same(completions, answer, prompts, **columns):
    assert len(completions) == len(answer) == len(prompts)
    assert all(prompt.endswith(f" {right}") for prompt, right in zip(prompts, answer, strict=True))
    return [None if right == "a" else 1.0 for right in answer]

def talks(completions, prompts, **columns):
    assert prompts[0] == [{"role": "user", "content": "say a"}]
    assert completions[0][0]["role"] == "assistant"
    return [float(len(completion[0]["content"])) for completion in completions]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {letter}", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def config(place: Path, name: str, method: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    asked = {"name": "grpo", "rewards": [f"{place}/rewards.py:short"], "group_size": 4, "max_new_tokens": 8}
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": str(place / "rows.jsonl"),
        "method": asked | {"stop": ["e", "t", " "]} | (method or {}),
        "adapter": {"rank": 4},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 5, "rows_per_step": 3, "precision": "fp32"},
        "checkpoint": {"every": 2},
        "output": str(place / name),
    }
    return RunConfig.model_validate(values | changes)


def told(run: RunConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_is_learnt(place: Path) -> None:
    run = config(
        place,
        "run",
        {"group_size": 12, "stop": "e", "max_new_tokens": 12},
        adapter=None,
        train={"steps": 12, "rows_per_step": 4, "precision": "fp32"},
    )
    grpo.train(run)
    lines = told(run)
    lengths = [line["completion_length"] for line in lines]
    assert sum(lengths[-3:]) / 3 < 0.6 * sum(lengths[:3]) / 3
    assert lines[0]["reward"] == lines[0]["reward/short"] == -lengths[0]
    assert lines[-1]["clip_low"] == lines[-1]["clip_high"] == 0.0  # one update with each sample: nothing has moved


@pytest.mark.parametrize(
    "method",
    [
        {"loss": "grpo", "beta": 0.1, "updates_per_sample": 2, "temperature": 0.8, "top_p": 0.9},
        {
            "filter_groups": True,
            "resample": 1,
            "ratio": "sequence",
            "epsilon_low": 1e-4,
            "updates_per_sample": 2,
            "mask_truncated": True,
        },
    ],
    ids=["with a reference", "filtered"],
)
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    place: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    adapter = {"rank": 4, "dropout": 0.1}
    whole, broken = (config(place, name, method, adapter=adapter) for name in ("whole", "broken"))
    assert grpo.train(whole)["steps"] == 5
    take_step, stop_at = grpo.take_step, {3}

    def stopping(run: grpo.Run, batch: Any) -> dict[str, float]:
        measured = take_step(run, batch)
        if run.state.counters.step in stop_at:
            stop_at.discard(run.state.counters.step)
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(grpo, "take_step", stopping)
    assert grpo.train(broken)["interrupted"] == "SIGTERM"
    assert grpo.train(broken, resume="must")["steps"] == 5
    assert_same_end(whole.output, broken.output)
    line = told(whole)[-1]
    if method.get("beta"):
        assert line["kl"] > 0
    else:
        assert line["clip_low"] + line["clip_high"] > 0  # the second update moves away from what was sampled


@pytest.mark.parametrize(
    "adapter", [None, {"rank": 4, "dora": True, "train_modules": ["lm_head"]}], ids=["full", "dora"]
)
def test_the_reference_is_the_model_before_its_first_step(place: Path, adapter: Any) -> None:
    run = config(place, "run", {"beta": 0.1}, adapter=adapter)
    grpo.train(run)
    found = [line["kl"] for line in told(run)]
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert min(found[1:]) > 1e-5


def test_equal_groups_are_sampled_again_and_left_out(place: Path) -> None:
    rewards = [f"{place}/rewards.py:same"]
    run = config(place, "run", {"rewards": rewards, "filter_groups": True, "resample": 2}, train={"steps": 1})
    summary = grpo.train(run)
    assert (summary["loss"], summary["trained_tokens"]) == (0.0, 0)
    [line] = told(run)
    assert (line["filtered_groups"], line["resampled_groups"], line["equal_groups"]) == (8, 8, 1.0)
    assert line["reward"] == 1.0  # of those that the function had a say about


def test_messages_are_rendered_and_answers_are_messages(place: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "say a"}]}]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    run = config(
        place, "run", {"rewards": [f"{place}/rewards.py:talks", f"{place}/rewards.py:short"], "weights": [1, 0.5]}
    )
    grpo.train(run)
    line = told(run)[0]
    assert line["reward"] == pytest.approx(line["reward/talks"] + 0.5 * line["reward/short"])


def test_a_dry_run_samples(place: Path) -> None:
    assert dry_run(config(place, "run"))["tokens_per_step"] > 0


def on_rank(values: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    return grpo.train(RunConfig.model_validate(values))


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}], ids=str)
def test_data_ranks_sample_their_own_prompts(world: Any, place: Path, layout: dict[str, int]) -> None:
    method = {"loss": "grpo", "beta": 0.1, "scale_rewards": "batch", "updates_per_sample": 2}
    more = {
        "train": {"steps": 2, "rows_per_step": 4, "precision": "fp32"},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
    }
    alone = config(place, "alone", method, **more)
    grpo.train(alone)
    both = config(place, "both", method, parallel=layout, **more)
    world(2).run(on_rank, both.model_dump(mode="json"))
    for one, other in zip(told(alone), told(both), strict=True):
        for name in ("reward", "reward_std", "completion_length", "rows", "tokens", "trained_tokens"):
            assert one[name] == other[name], name  # a prompt is answered alike wherever it is
        for name in ("loss", "gradient_norm", "kl"):
            assert other[name] == pytest.approx(one[name], rel=2e-4, abs=1e-6), name


def moved_on_rank(values: dict[str, Any]) -> list[str]:
    return moved(RunConfig.model_validate(values))


def moved(run: RunConfig) -> list[str]:
    """Trained weights that the second step of two moves, in which all answers are worth the same: six times 0.7, whose
    mean is rounded."""
    with grpo.opened(run, "never") as opened:
        first, second = opened.loader
        grpo.take_step(opened, first)
        before = {name: local_part(p).detach().clone() for name, p in opened.state.trainable.items()}
        opened.kept["rollouts"].functions = {"alike": lambda completions, **_: [0.7] * len(completions)}
        measured = grpo.take_step(opened, second)
        assert (measured["loss"], measured["gradient_norm"], measured["equal_groups"]) == (0.0, 0.0, 1.0)
        assert opened.state.counters.step == 2
        return [name for name, p in opened.state.trainable.items() if not torch.equal(local_part(p), before[name])]


def test_a_step_that_teaches_nothing_moves_nothing(world: Any, place: Path) -> None:
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1}
    more: dict[str, Any] = {"train": {"steps": 2, "rows_per_step": 2, "precision": "fp32"}, "optimizer": optimizer}
    six = {"group_size": 6}
    assert moved(config(place, "alone", six, **more)) == []
    both = config(place, "both", six, parallel={"dp_shard": 2}, **more)
    assert world(2).run(moved_on_rank, both.model_dump(mode="json")) == [[], []]


def waits(values: dict[str, Any]) -> list[float]:
    """On every rank: how long the others wait while a reward function works, at steps in which training waits less."""
    found = []
    world: Any = dist.group.WORLD

    def slow(completions: list[Any], **_: Any) -> list[float]:
        found.append(world._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        return [1.0] * len(completions)

    with grpo.opened(RunConfig.model_validate(values), "never") as opened:
        opened.once("rollouts", lambda: grpo.Rollouts(opened.config, opened.state)).functions = {"slow": slow}
        for batch in opened.loader:
            set_timeout(STEP_TIMEOUT)
            grpo.take_step(opened, batch)
        found.append(world._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


def test_ranks_wait_for_slow_rewards(world: Any, place: Path) -> None:
    more: dict[str, Any] = {"train": {"steps": 1, "rows_per_step": 2, "precision": "fp32"}}
    both = config(place, "both", parallel={"dp_shard": 2}, **more)
    found = world(2).run(waits, both.model_dump(mode="json"))
    assert found == [[FIRST_STEP_TIMEOUT, STEP_TIMEOUT]] * 2


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("x", "it gives str, not a list"),
        ([1.0], "it gives 1 numbers for 2 answers"),
        ([1.0, float("nan")], r"reward r, rows\.jsonl:2: it gives nan"),
        ([1.0, "a"], r"reward r, rows\.jsonl:2: it gives 'a', which is no number"),
        (ZeroDivisionError("by hand"), r"reward r: it raises ZeroDivisionError: by hand \(of rows rows\.jsonl:1, rows"),
        ([1.0, 10**400], r"reward r, rows\.jsonl:2: it gives inf; give None"),
        (SystemExit(0), r"reward r: it exits: it raises SystemExit: 0 \(of rows rows\.jsonl:1, rows"),
        (ValueError("one\ntwo"), r"reward r: it raises ValueError: one \(of rows"),
    ],
)
def test_what_is_wrong_with_a_reward_is_named(answer: Any, fault: str) -> None:
    def function(**columns: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pytest.raises(DataError, match=fault):
        call_reward("r", function, ["p", "p"], ["a", "b"], [[1], [2]], {}, ["rows.jsonl:1", "rows.jsonl:2"])


def test_a_column_of_a_format_of_ones_own_never_gives_way_to_what_is_sampled() -> None:
    with pytest.raises(DataError, match=r"column 'completions' has the name of what is sampled \(of rows own\.txt:1"):
        call_reward("r", lambda **columns: [1.0], ["p"], ["a"], [[1]], {"completions": ["b"]}, ["own.txt:1"])


def test_rewards_that_are_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "own_rewards.py").write_text(REWARDS)
    assert list(load_rewards(["own_rewards:short", "rewards.py:same"])) == ["short", "same"]
    (place / "broken.py").write_text("1 / 0")
    (place / "leaving.py").write_text("raise SystemExit")
    for name, fault in (
        ("short", "names no function"),
        ("nowhere_at_all:short", "cannot be imported .ModuleNotFoundError"),
        ("broken.py:short", "cannot be imported .ZeroDivisionError"),
        ("leaving.py:short", "cannot be imported .SystemExit"),
        ("rewards.py:long", "has no function 'long'"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load_rewards([name])
    with pytest.raises(ConfigError, match="two rewards are called 'short'"):
        load_rewards(["own_rewards:short", "rewards.py:short"])


DATACLASS = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass
class Asked:
    worth: float

asked = []

def worth(completions, **columns):
    asked.append(Asked({worth}))
    return [asked[-1].worth] * len(completions)
"""


def test_a_file_of_rewards_is_a_module_like_any_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "other").mkdir()
    for number, name in enumerate(("own.py", "other/own.py")):
        (place / name).write_text(DATACLASS.replace("{worth}", str(number)))
    first, second = (load_rewards([f"{name}:worth"])["worth"] for name in ("own.py", "other/own.py"))
    assert (first(["a"]), second(["a"])) == ([0], [1])
    assert load_rewards([f"{place}/own.py:worth"])["worth"] is first  # executed once, whatever way it is named
    (place / "own.py").write_text(DATACLASS.replace("{worth}", "25"))
    assert load_rewards(["own.py:worth"])["worth"](["a"]) == [25]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"parallel": {"tp": 2}}, "has no parallel.tp; use dp_shard"),
        ({"data": {"train": "rows.jsonl", "validation": "rows.jsonl"}}, "nothing on held-out rows"),
        ({"method": {"name": "grpo", "rewards": ["a:b"], "weights": [1.0, 2.0]}}, "there are 1 rewards and 2 weights"),
        ({"method": {"name": "grpo", "rewards": ["a:b"], "resample": 2}}, "set that to true"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(place: Path, changes: dict[str, Any], fault: str) -> None:
    values = config(place, "run").model_dump() | {"data": "rows.jsonl"} | changes
    with pytest.raises(ValueError, match=fault):
        RunConfig.model_validate(values)


def test_a_group_without_rewards_teaches_nothing() -> None:
    nan = torch.tensor([torch.nan, torch.nan])
    assert Group([1], "", rewards=nan).equal
    assert not Group([1], "", rewards=torch.tensor([torch.nan, 1.0, 2.0])).equal

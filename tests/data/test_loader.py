"""Which rows a step has, resuming to the exact row, ranks, hold-out, streaming."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from luthier.config.sections import DataConfig, TrainConfig
from luthier.data.loader import Loader, LoaderState, Rows, build_rows, iterate_once
from luthier.errors import CheckpointError, ConfigError, DataError


def write(path: Path, count: int, name: str = "row", **more: Any) -> str:
    words = ["oak", "ash", "elm", "yew", "box", "fir"]
    lines = [{"text": f"{name}{i} " + " ".join(words[: 1 + i % 6]), **more} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def data(tmp_path):
    def make(count: int = 37, **more: Any) -> DataConfig:
        return DataConfig(train=write(tmp_path / "a.jsonl", count), cache=False, sequence_length=64, **more)

    return make


def origins(step: Any) -> list[int]:
    return sorted(int(o.rpartition(":")[2]) for batch in step.microbatches for o in batch.origins if o)


def loader_of(data: DataConfig, tokenizer: Any, rows: Any = None, seed: int = 5, **train: Any) -> Loader:
    made = rows if rows is not None else build_rows(data, "train", tokenizer, seed=seed)
    place = {name: train.pop(name) for name in ("rank", "world_size") if name in train}
    return Loader(made, data, TrainConfig(**train), seed=seed, **place)


BATCHES = [{"rows_per_step": 8}, {"rows_per_step": 50}, {"tokens_per_step": 100}, {"tokens_per_step": 1}, {}]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("epochs", [1, 2, 0.5, 1.3])
def test_steps_total_counts_the_last_and_smaller_batches(data, tiny, batch, epochs):
    config = data()
    loader = loader_of(config, tiny, epochs=epochs, **batch)
    steps = list(loader)
    assert len(steps) == loader.steps_total()
    assert sum(step.rows for step in steps) == int(epochs) * 37 + round((epochs % 1) * 37 + 0.4999)
    assert steps[-1].state.step == len(steps)
    seen = Counter(row for step in steps for row in origins(step))
    assert max(seen.values()) == -(-epochs // 1)
    assert abs(steps[-1].epoch - epochs) < 1 / 37


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_rows_of_a_step_do_not_depend_on_packing_or_ranks(data, tiny, batch):
    wanted = [
        (origins(s), s.rows, s.tokens, s.trained_tokens, s.total_weight) for s in loader_of(data(), tiny, **batch)
    ]
    for packing, world in itertools.product((True, False), (1, 2, 3)):
        config = data(packing=packing)
        rows = build_rows(config, "train", tiny)
        parts = [list(loader_of(config, tiny, rows, rank=rank, world_size=world, **batch)) for rank in range(world)]
        for wanted_step, *step in zip(wanted, *parts, strict=True):
            assert sorted(itertools.chain(*map(origins, step))) == wanted_step[0]
            assert len({len(part.microbatches) for part in step}) == 1
            for part in step:
                assert (part.rows, part.tokens, part.trained_tokens, part.total_weight) == wanted_step[1:]
            held = [batch for part in step for batch in part.microbatches]
            assert sum(batch.total_weight for batch in held) == pytest.approx(wanted_step[4])
            assert max(batch.tokens for batch in held) <= 64


def test_tokens_per_step_takes_rows_while_they_fit(data, tiny):
    config = data(shuffle=False)
    rows = build_rows(config, "train", tiny)
    lengths = list(rows.lengths)
    for step in loader_of(config, tiny, rows, tokens_per_step=60):
        assert step.tokens <= 60 or step.rows == 1
        end = origins(step)[-1]
        if end < len(lengths):
            assert step.tokens + lengths[end] > 60


def test_epochs_have_new_orders(data, tiny):
    steps = list(loader_of(data(), tiny, epochs=2, rows_per_step=37))
    assert origins(steps[0]) == origins(steps[1]) == list(range(1, 38))
    orders = [step.microbatches[0].origins for step in steps]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("batch", [{"rows_per_step": 5}, {"tokens_per_step": 70}], ids=str)
def test_resuming_gives_the_same_batches_from_any_place(tmp_path, tiny, batch, streaming):
    more = {"streaming": True, "shuffle_buffer": 7, "too_long": "split"} if streaming else {}
    data = DataConfig(train=write(tmp_path / "a.jsonl", 23), cache=False, sequence_length=16, **more)
    length = {"steps": 30}

    def told(step: Any) -> Any:
        return [(b.origins, b.input_ids.tolist(), b.weights.tolist()) for b in step.microbatches], step.state

    unbroken = [told(step) for step in loader_of(data, tiny, **batch, **length)]
    assert len(unbroken) == 30
    # the places include the end of an epoch and the middle of a later one
    for stop in (1, 4, 5, 6, 12, 29, 30):
        state = LoaderState.from_dict(json.loads(json.dumps(unbroken[stop - 1][1].to_dict())))
        again = loader_of(data, tiny, **batch, **length)
        again.restore(state)
        assert [told(step) for step in again] == unbroken[stop:]


@pytest.mark.parametrize("batch", [{"rows_per_step": 5}, {"tokens_per_step": 70}], ids=str)
def test_a_run_of_part_of_an_epoch_can_be_given_more(data, tiny, batch):
    short = loader_of(data(), tiny, epochs=1.3, **batch)
    first = list(short)
    assert short.steps_total() == len(first)
    longer = loader_of(data(), tiny, epochs=3, **batch)
    longer.restore(short.state)
    total = longer.steps_total()
    steps = first + list(longer)
    assert len(steps) == total == longer.steps_total()
    assert Counter(row for step in steps for row in origins(step)) == dict.fromkeys(range(1, 38), 3)


def test_the_place_moves_with_the_loop(data, tiny):
    loader = loader_of(data(), tiny, rows_per_step=10)
    for step in loader:
        if step.state.step == 2:
            break
    assert loader.state == step.state
    assert (loader.state.position, loader.state.rows) == (20, 20)
    rest = [s.rows for s in loader]
    assert rest == [10, 7]
    assert (loader.state.epoch, loader.state.position) == (1, 0)


def test_what_changed_is_named_on_resume(data, tiny, tmp_path):
    state = next(iter(loader_of(data(), tiny, rows_per_step=8))).state
    for train, words in (({"rows_per_step": 9}, "rows_per_step was 8, is 9"), ({"tokens_per_step": 9}, "is None")):
        with pytest.raises(CheckpointError, match=words):
            loader_of(data(), tiny, **train).restore(state)
    with pytest.raises(CheckpointError, match="seed was 5, is 6"):
        loader_of(data(), tiny, rows_per_step=8, seed=6).restore(state)
    with pytest.raises(CheckpointError, match="the training rows are others"):
        loader_of(data(38), tiny, rows_per_step=8).restore(state)
    loader_of(data(packing=False), tiny, rows_per_step=8).restore(state)


def test_every_row_once_at_every_batch_size(data, tiny):
    rows = build_rows(data(), "train", tiny)
    for tokens, world, packing in itertools.product((1, 50, 10_000), (1, 3), (True, False)):
        parts = [list(iterate_once(rows, tokens, rank=r, world_size=world, packing=packing)) for r in range(world)]
        assert len({len(part) for part in parts}) == 1
        batches = [batch for part in parts for batch in part]
        seen = sorted(int(o.rpartition(":")[2]) for b in batches for o in b.origins if o)
        assert seen == list(range(1, 38))
        assert sum(batch.total_weight for batch in batches) == rows.weight_sums.sum()
        assert all(batch.tokens <= tokens or batch.documents == 1 for batch in batches)


def test_held_out_rows(data, tiny, tmp_path):
    config = data(validation_fraction=0.2)
    train, held = (build_rows(config, which, tiny, seed=3) for which in ("train", "validation"))
    texts = [{tuple(rows[i].tokens) for i in range(len(rows))} for rows in (train, held)]
    assert not texts[0] & texts[1]
    assert (len(train), len(held)) == (30, 7)
    assert [held[i].origin for i in range(7)] == [
        build_rows(config, "validation", tiny, seed=3)[i].origin for i in range(7)
    ]
    other = build_rows(config, "validation", tiny, seed=4)
    assert {held[i].origin for i in range(7)} != {other[i].origin for i in range(7)}
    assert train.fingerprint != held.fingerprint
    assert sorted(row for step in loader_of(config, tiny, train) for row in origins(step)) == sorted(
        int(train[i].origin.rpartition(":")[2]) for i in range(30)
    )


def test_rows_that_are_alike_stay_on_one_side(tiny, tmp_path):
    path = tmp_path / "a.jsonl"
    long = "a long row that is split into pieces " * 3
    texts = [f"row {i % 5}" for i in range(40)] + [long + str(i) for i in range(4)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig(train=str(path), validation_fraction=0.3, cache=False, sequence_length=16, too_long="split")
    for seed in range(5):
        train, held = (build_rows(config, which, tiny, seed=seed) for which in ("train", "validation"))
        lines = [{rows[i].origin for i in range(len(rows))} for rows in (train, held)]
        assert not lines[0] & lines[1]
        kept = [{texts[int(line.rpartition(":")[2]) - 1] for line in side} for side in lines]
        assert not kept[0] & kept[1]
    path.write_text('{"text": "one"}\n' * 9)
    with pytest.raises(DataError, match="too few different rows"):
        build_rows(config, "train", tiny)


def test_sources_with_and_without_weights(tiny, tmp_path):
    small, large = write(tmp_path / "s.jsonl", 10, "s"), write(tmp_path / "l.jsonl", 60, "l")
    plain = DataConfig(train=[small, large], cache=False)
    assert loader_of(plain, tiny, rows_per_step=1).steps_total() == 70
    mixed = DataConfig(train=[{"path": small, "weight": 1}, {"path": large, "weight": 2}], cache=False)
    loader = loader_of(mixed, tiny, rows_per_step=5, epochs=3)
    steps = list(loader)
    assert len(steps) == loader.steps_total() == 18
    names = Counter(o.rpartition("/")[2][0] for step in steps for b in step.microbatches for o in b.origins)
    assert names == {"s": 30, "l": 60}
    rows = loader_of(mixed, tiny)._rows
    assert isinstance(rows, Rows)
    assert len(rows) == 70
    assert rows.epoch_rows == 30
    assert len(rows.first(12)) == 12


def test_a_config_without_rows(tiny):
    with pytest.raises(ConfigError, match=r"data\.train"):
        build_rows(DataConfig(), "train", tiny)
    with pytest.raises(ConfigError, match=r"data\.validation"):
        build_rows(DataConfig(train="x"), "validation", tiny)
    with pytest.raises(DataError, match="no such file"):
        build_rows(DataConfig(train="nowhere.jsonl"), "train", tiny)


def test_streams_give_each_row_once_an_epoch(tiny, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", 9, name) for name in "ab"]
    for shuffle in (True, False):
        data = DataConfig(train=files, streaming=True, shuffle=shuffle, shuffle_buffer=5, sequence_length=64)
        steps = list(loader_of(data, tiny, rows_per_step=4, steps=10))
        sizes = [step.rows for step in steps]
        assert sizes == [4, 4, 4, 4, 2] * 2
        epochs = [[o for s in steps[start : start + 5] for b in s.microbatches for o in b.origins] for start in (0, 5)]
        assert sorted(epochs[0]) == sorted(epochs[1])
        assert len(set(epochs[0])) == 18
        assert (epochs[0] != epochs[1]) == shuffle
        assert [step.state.epoch for step in steps] == [0] * 5 + [1] * 5


def test_streams_mix_by_weight(tiny, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", 9, name) for name in "ab"]
    sources = [{"path": files[0], "weight": 3}, {"path": files[1], "weight": 1}]
    data = DataConfig(train=sources, streaming=True, shuffle_buffer=5)
    steps = list(loader_of(data, tiny, rows_per_step=20, steps=50))
    names = Counter(o.rpartition("/")[2][0] for step in steps for b in step.microbatches for o in b.origins)
    assert 0.70 < names["a"] / 1000 < 0.80


def test_streams_that_give_nothing(tiny, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n' * 3)
    for weight in ({}, {"weight": 2.0}):
        sources = [{"path": str(path), **weight}, {"path": write(tmp_path / "b.jsonl", 2), **weight}]
        data = DataConfig(train=sources if weight else sources[:1], streaming=True, shuffle_buffer=2)
        with pytest.raises(DataError, match="no rows are left to be used"):
            list(loader_of(data, tiny, steps=100))
    with pytest.raises(ConfigError, match=r"train\.steps"):
        loader_of(data, tiny)


def test_a_stream_holds_no_more_rows_than_its_buffer(tiny, tmp_path):
    data = DataConfig(train=write(tmp_path / "a.jsonl", 500), streaming=True, shuffle_buffer=20, sequence_length=64)
    rows = build_rows(data, "train", tiny)
    assert rows.stop_ids == [tiny.eos_token_id]
    for _ in itertools.islice(rows.samples(), 30):
        pass
    assert rows.report.read == 30
    skipped = build_rows(data, "train", tiny)
    next(skipped.samples(400, 0))
    assert skipped.report.read == 1


def test_rows_that_lie_ahead_are_those_that_come(tmp_path, tiny):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "row number {n}"}}\n' for n in range(11)))
    data = DataConfig(train=str(path), sequence_length=64)
    rows = build_rows(data, "train", tiny)
    for train in (TrainConfig(rows_per_step=2, steps=3), TrainConfig(tokens_per_step=40, epochs=0.7), TrainConfig()):
        loader = Loader(rows, data, train)
        wanted = loader.ahead().tolist()
        batches = iter(loader)
        first = next(batches)
        assert loader.ahead().tolist() == wanted  # with what has just come
        seen = [row.number for step in (first, *batches) for batch in step.microbatches for row in batch.rows]
        assert sorted(set(seen)) == wanted

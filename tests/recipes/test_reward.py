"""Reward models: TRL's loss and gradients of the same pairs, exports that give plain Transformers the same scores."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from luthier.batch import Batch, Sample
from luthier.config import RunConfig
from luthier.config.sections import SGDConfig
from luthier.data.rows import Rows, build_rows
from luthier.engine.build import build_state
from luthier.engine.reward import Ranking, scores_of
from luthier.engine.step import forward_backward_all
from luthier.errors import ConfigError, DataError
from luthier.hf.classifier import as_classifier, padding_of
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.load import load_model
from luthier.hf.source import resolve
from luthier.recipes import reward
from luthier.recipes.export import export
from tests.oracles.plain import gradient_error, save_strong
from tests.recipes.test_train import assert_same_end

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import RewardTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
PAIRS = [("a good answer", "bad", 0.0), ("yes", "no, not at all", 0.5), ("1 + 1 = 2", "1 + 1 = 3", 2.0)]


def rows_of(place: Path, count: int = 8) -> Path:
    rows = [
        {"prompt": f"number {n}: ", "chosen": f"{n} is {n}", "rejected": "x" * (n + 1), "margin": 0.1 * n}
        for n in range(count)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place / "rows.jsonl"


def config(place: Path, name: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": "debug:llama",
        "data": {"train": str(place / "rows.jsonl"), "sequence_length": 64},
        "method": {"name": "reward", "center": 0.01},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 8, "rows_per_step": 4, "precision": "fp32"},
        "checkpoint": {"every": 2},
        "output": str(place / name),
    }
    return RunConfig.model_validate(values | changes)


def ids_of_pairs() -> list[list[list[int]]]:
    tokenizer = debug_tokenizer()
    return [[ids_of(tokenizer, text) for text in texts] for *texts, _ in PAIRS]


def samples() -> list[Sample]:
    """The pairs, a row each."""
    return [
        Sample.join([Sample.from_ids(one, np.ones(len(one))) for one in ids], "row", {"margin": margin})
        for ids, (*_, margin) in zip(ids_of_pairs(), PAIRS, strict=True)
    ]


def pairs() -> tuple[Batch, list[list[int]]]:
    """The pairs as a loader gives them, and the whole texts."""
    return Batch.pack(samples()), [text for texts in ids_of_pairs() for text in texts]


@pytest.mark.parametrize("center", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_loss_and_gradients_are_those_of_trl(tmp_path: Path, kind: str, center: float) -> None:
    save_strong(debug_config(kind), tmp_path)
    tokenizer = debug_tokenizer()
    padding = padding_of(tokenizer)
    state = build_state(
        resolve(str(tmp_path)), adapter=None, optimizer=SGDConfig(name="sgd"), precision="fp64", score=True
    )
    batch, texts = pairs()
    laid = reward.laid_out(batch, padding, 1 / len(PAIRS))
    [output] = forward_backward_all(state, [laid], Ranking(center))
    gradients = {name: p.grad for name, p in state.trainable.items() if p.grad is not None}

    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, dtype=torch.float64, pad_token_id=padding
    )
    with torch.no_grad():
        plain.score.weight.copy_(state.model.score.weight)
    order = [*texts[0::2], *texts[1::2]]
    width = max(map(len, order))
    ids = torch.tensor([one + [padding] * (width - len(one)) for one in order])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in order])
    trainer = SimpleNamespace(
        model=plain.train(),
        args=SimpleNamespace(center_rewards_coefficient=center or None),
        accelerator=SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    margins = torch.tensor([margin for *_, margin in PAIRS], dtype=torch.float64)
    inputs = {"input_ids": ids, "attention_mask": mask, "margin": margins}
    scores = plain(input_ids=ids, attention_mask=mask).logits[:, 0].detach()
    original = plain.forward
    plain.forward = lambda margin=None, **more: original(**more)
    loss = RewardTrainer.compute_loss(trainer, plain, inputs)
    loss.backward()
    # gemma2 computes parts in fp32, whatever it is asked
    bound = 1e-10 if kind == "llama" else 1e-5
    assert float(output.loss) == pytest.approx(float(loss.detach()), rel=bound)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert gradient_error(gradients, expected) < bound
    [found] = scores_of(state, [laid])
    assert torch.allclose(found.view(-1, 2).T.flatten(), scores, rtol=bound)


def test_a_model_that_reads_one_document_at_a_time(tmp_path: Path) -> None:
    """What it learns from documents alone is what another learns from packed ones."""
    save_strong(debug_config("llama"), tmp_path / "model")
    how: dict[str, Any] = {"adapter": None, "optimizer": SGDConfig(name="sgd"), "precision": "fp64", "score": True}
    state = build_state(resolve(str(tmp_path / "model")), **how)
    packed, _ = pairs()
    rows = [Batch.pack([row]) for row in samples()]
    laid = [reward.laid_out(batch, padding_of(debug_tokenizer()), 1 / len(PAIRS)) for batch in (packed, *rows)]
    found = []
    for state.packing_fault in ("", "of a test"):
        if state.packing_fault:
            outputs = reward.one_by_one(state, laid[1:], 0.05)
        else:
            outputs = forward_backward_all(state, laid[:1], Ranking(0.05))
        scores = torch.cat([output.logprobs[output.logprobs != 0] for output in outputs])
        gradients = {name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None}
        found.append((float(sum(output.loss for output in outputs)), scores.tolist(), gradients))
        state.optimizer.zero_grad()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-10)
    assert gradient_error(found[1][2], found[0][2]) < 1e-10

    rows_of(tmp_path)
    data = dict.fromkeys(("train", "validation"), str(tmp_path / "rows.jsonl")) | {"sequence_length": 64}
    summary = reward.train(config(tmp_path, "bloom", model="debug:bloom", data=data))
    assert summary["steps"] == 8
    assert summary["validation"]["reward_accuracy"] > 0.8


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "lora"])
def test_a_reward_model_learns_goes_on_and_opens_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Any
) -> None:
    rows = rows_of(tmp_path)
    data = {"train": str(rows), "validation": str(rows), "sequence_length": 64}
    whole, broken = (config(tmp_path, name, adapter=adapter, data=data) for name in ("whole", "broken"))
    summary = reward.train(whole)
    lines = [json.loads(line) for line in (whole.output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward_accuracy" in line]
    assert steps[-1]["reward_margin"] > steps[0]["reward_margin"] + 0.1
    assert summary["validation"]["reward_accuracy"] > 0.8
    take_step = reward.take_step

    def stopping(run: Any, batch: Any) -> dict[str, float]:
        measured = take_step(run, batch)
        if run.state.counters.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return measured

    monkeypatch.setattr(reward, "take_step", stopping)
    assert reward.train(broken)["steps"] == 3
    monkeypatch.setattr(reward, "take_step", take_step)
    reward.train(broken, resume="must")
    assert_same_end(whole.output, broken.output)

    texts = ["number 3: 3 is 3", "number 3: xxxx"]
    merged = tmp_path / "merged"
    export(whole.output, output=merged)
    plain = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    assert plain.config.num_labels == 1
    assert plain.config.architectures == ["LlamaForSequenceClassification"]
    tokenizer = AutoTokenizer.from_pretrained(merged)
    scores = [score_of(plain, tokenizer, text) for text in texts]
    assert scores[0] > scores[1]
    with reward.opened(whole, "must") as run:
        batch = Batch.pack(
            [Sample.join([Sample.from_ids(ids, np.ones(len(ids))) for ids in (ids_of(tokenizer, t) for t in texts)])]
        )
        run.state.model.eval()
        [own] = scores_of(run.state, [reward.laid_out(batch, padding_of(tokenizer), 1.0)])
        view = as_classifier(run.state.model, padding_of(tokenizer))
        base = run.config.model
    assert own.tolist() == pytest.approx(scores, abs=2e-6)
    if adapter is None:
        opened = AutoModelForSequenceClassification.from_pretrained(whole.output / "export", dtype=torch.float32)
    else:
        assert base == "debug:llama"
        fresh = type(view)(view.config)
        fresh.model = load_model(resolve("debug:llama"), dtype="fp32").model
        opened = PeftModel.from_pretrained(fresh, str(whole.output / "export"))
        assert opened.peft_config["default"].task_type == "SEQ_CLS"
        assert "score" in opened.peft_config["default"].modules_to_save
    assert [score_of(opened, tokenizer, text) for text in texts] == pytest.approx(own.tolist(), abs=2e-6)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def score_of(model: Any, tokenizer: Any, text: str) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids_of(tokenizer, text)])).logits[0, 0])


def on_rank(values: dict[str, Any]) -> dict[str, Any]:
    return reward.train(RunConfig.model_validate(values))


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "lora"])
def test_data_ranks(world: Any, tmp_path: Path, adapter: Any) -> None:
    rows_of(tmp_path, 7)  # of the last batch's one pair, one of the ranks has none
    more = {"train": {"epochs": 1, "rows_per_step": 3, "precision": "fp32"}, "adapter": adapter}
    more |= {"optimizer": {"name": "sgd", "learning_rate": 0.1}}
    alone, both = config(tmp_path, "alone", **more), config(tmp_path, "both", parallel={"dp_shard": 2}, **more)
    reward.train(alone)
    world(2).run(on_rank, both.model_dump(mode="json"))
    files = [run.output / "metrics.jsonl" for run in (alone, both)]
    told = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for one, other in zip(*told, strict=True):
        for name in ("loss", "gradient_norm", "reward_margin", "reward_accuracy"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"parallel": {"tp": 2}}, "a reward model has no parallel.tp; use dp_shard"),
        ({"adapter": {"rank": 4, "start_from": "somewhere"}}, "leave adapter.start_from out"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        config(tmp_path, "run", **changes)


@pytest.mark.parametrize("model", ["debug:llama", "debug:gemma"])
@pytest.mark.parametrize(
    ("adapter", "field"),
    [
        ({"target": ["attn", "unembed"]}, "adapter.target"),
        ({"target": ["lm_head"]}, "adapter.target"),
        ({"train_modules": ["lm_head"]}, "adapter.train_modules"),
    ],
)
def test_a_head_that_a_score_stands_in_place_of_is_not_trained(
    tmp_path: Path, model: str, adapter: dict[str, Any], field: str
) -> None:
    """With the embedding's weight or one of its own: it would get no gradient and be in no export."""
    rows_of(tmp_path)
    with pytest.raises(ConfigError, match=f"^{field}: lm_head writes text"):
        reward.train(config(tmp_path, "run", model=model, adapter=adapter))


def test_a_text_that_is_a_token_longer_than_the_model(tmp_path: Path) -> None:
    longest = debug_config("gpt2").n_positions
    rows_of(tmp_path, 2)
    row = {"prompt": "q: ", "chosen": "a b " * longest, "rejected": "b"}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "sequence_length": longest}
    more: dict[str, Any] = {"model": "debug:gpt2", "train": {"steps": 1, "rows_per_step": 3}}
    fault = f"rows of {longest + 1:,} tokens, and the model has {longest:,} positions; set it to {longest - 1} or less"
    with pytest.raises(ConfigError, match=fault):
        reward.train(config(tmp_path, "run", data=data, **more))
    data["sequence_length"] = longest - 1
    assert reward.train(config(tmp_path, "run", data=data, **more))["steps"] == 1


@pytest.mark.parametrize("margin", ['"much"', "NaN", "true", "[1]", '"inf"'])
def test_a_margin_that_is_no_number(tmp_path: Path, margin: str) -> None:
    rows_of(tmp_path, 2)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(f'{{"prompt": "a", "chosen": "b", "rejected": "c", "margin": {margin}}}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:3: .*no number"):
        reward.train(config(tmp_path, "run"))
    data = config(tmp_path, "run", data={"train": str(tmp_path / "rows.jsonl"), "on_bad_row": "skip"}).data
    told = build_rows(data, "train", debug_tokenizer()).report
    assert (told.kept, dict(told.skipped)) == (2, {"margins that are no numbers": 1})


def test_margins_in_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected,margin\na,b,c, 1.5\na,b,c,\n")
    rows = build_rows(config(tmp_path, "run", data=str(tmp_path / "rows.csv")).data, "train", debug_tokenizer())
    assert isinstance(rows, Rows)
    assert [dict(rows[number].meta) for number in range(2)] == [{"margin": 1.5}, {}]

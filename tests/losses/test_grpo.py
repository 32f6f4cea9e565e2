"""GRPO's loss, gradients and advantages are those of TRL's GRPOTrainer on the same answers, and of the formula."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig as TrlConfig
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from luthier.config import RunConfig
from luthier.config.reinforcement import GrpoConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.evaluate import logprobs_of
from luthier.engine.step import forward_backward_all
from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.hf.source import resolve
from luthier.losses import grpo as losses
from luthier.recipes.grpo import laid_out, loss_of
from luthier.recipes.rollout import Group
from luthier.sampling.request import SamplingResult
from tests.oracles.plain import gradient_error, plain_model, save_strong

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE, LONGEST = 4, 9
REWARDS = [[1.0, 0.0, 0.25, 0.5], [2.0, 2.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_strong(debug_config("llama"), tmp_path_factory.mktemp("models") / "strong")
    debug_tokenizer().save_pretrained(path)
    return path


def groups() -> list[Group]:
    """Answers of uneven lengths to prompts of uneven lengths; the last of each group was cut."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(10, 200, (count,), generator=generator).tolist()

    found = []
    for number, rewards in enumerate(REWARDS):
        answers = [SamplingResult(ids(length), [], "stop") for length in (3, 7, 1 + number)]
        answers.append(SamplingResult(ids(LONGEST), [], "length"))
        values = torch.tensor(rewards, dtype=torch.float64)
        found.append(Group(ids(4 + 3 * number), f"row {number}", {}, answers, values[:, None], values, 1))
    return found


def moved_by(kind: int, answer: list[int]) -> torch.Tensor:
    """How far other weights were from the log-probabilities of an answer: those of sampling (0), the reference (1)."""
    generator = torch.Generator().manual_seed(2 * sum(answer) + kind)
    return 0.3 * torch.randn(len(answer), generator=generator, dtype=torch.float64)


def advantages_of(asked: GrpoConfig) -> torch.Tensor:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    found = rewards - rewards.mean(1, keepdim=True)
    if asked.scale_rewards != "none":
        found = found / ((rewards.std(1, keepdim=True) if asked.scale_rewards == "group" else rewards.std()) + 1e-4)
    return found


def of_trl(path: Path, tmp_path: Path, asked: GrpoConfig, moved: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients as TRL has them, with log-probabilities of sampling and of the reference that are moved."""
    config = TrlConfig(
        output_dir=str(tmp_path),
        num_generations=SIZE,
        per_device_train_batch_size=SIZE * len(REWARDS),
        max_completion_length=LONGEST,
        loss_type=asked.loss,
        importance_sampling_level=asked.ratio,
        epsilon=asked.epsilon_low,
        epsilon_high=asked.epsilon_high,
        beta=asked.beta,
        use_bias_correction_kl=asked.unbiased_kl,
        temperature=asked.temperature,
        scale_rewards=asked.scale_rewards,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        plain_model(path, torch.float64),
        lambda completions, **_: [0.0] * len(completions),
        config,
        Dataset.from_list([{"prompt": "a"}] * SIZE * len(REWARDS)),
        processing_class=debug_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    rows = [(group, answer) for group in groups() for answer in group.answers]
    widest = max(len(group.prompt) for group, _ in rows)

    def laid(values: list[list[int]], left: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and mask, padded on the left to a width, or on the right to the longest answer."""
        out = torch.zeros(len(values), left or LONGEST, dtype=torch.int64)
        mask = torch.zeros_like(out)
        for row, one in enumerate(values):
            place = slice(-len(one), None) if left else slice(0, len(one))
            out[row, place], mask[row, place] = torch.tensor(one), 1
        return out, mask

    prompt_ids, prompt_mask = laid([group.prompt for group, _ in rows], widest)
    completion_ids, completion_mask = laid([answer.tokens for _, answer in rows], None)
    if asked.mask_truncated:
        for row, (_, answer) in enumerate(rows):
            completion_mask[row] *= int(answer.stop_reason != "length")
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages_of(asked).flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }
    network = trainer.model
    network.train()
    with torch.no_grad():
        ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
        now, _, _ = trainer._get_per_token_logps_and_entropies(network, ids, mask, LONGEST)
    for kind, name in enumerate(("old_per_token_logps", "ref_per_token_logps")):
        if moved:
            values = torch.zeros(len(rows), LONGEST, dtype=torch.float64)
            for row, (_, answer) in enumerate(rows):
                values[row, : len(answer.tokens)] = moved_by(kind, answer.tokens)
            inputs[name] = now + values
    loss = trainer._compute_loss(network, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def of_ours(path: Path, asked: GrpoConfig, moved: bool) -> tuple[float, dict[str, torch.Tensor]]:
    state = build_state(resolve(str(path)), adapter=None, optimizer=SGDConfig(name="sgd"), precision="fp64")
    state.head = state.head.at(asked.temperature)
    run: Any = SimpleNamespace(config=RunConfig(model="debug:llama", data="rows.jsonl"), state=state)
    batches = laid_out(groups(), groups(), asked, run)
    if moved:
        for batch, now in zip(batches, logprobs_of(state, batches), strict=True):
            bounds = batch.cu_seqlens.tolist()
            for kind, name in enumerate(("sampled", "reference")):
                values = now.clone()
                for start, stop in itertools.pairwise(bounds):
                    counts = batch.weights[0, start:stop] != 0
                    answer = batch.targets[0, start:stop][counts].tolist()
                    values[start:stop][counts] += moved_by(kind, answer)
                batch.inputs[name] = values  # type: ignore[index]
    outputs = forward_backward_all(state, batches, loss_of(asked))
    gradients = {name: p.grad for name, p in state.trainable.items() if p.grad is not None}
    return sum(float(output.loss) for output in outputs), gradients


def of_formula(path: Path, asked: GrpoConfig, moved: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The same by the formula, answer by answer, on plain Transformers in float64."""
    plain = plain_model(path, torch.float64)
    terms, counts = [], []
    for group, advantages in zip(groups(), advantages_of(asked), strict=True):
        for answer, advantage in zip(group.answers, advantages, strict=True):
            ids = torch.tensor([group.prompt + answer.tokens])
            logits = plain(ids, use_cache=False).logits[0, len(group.prompt) - 1 : -1] / asked.temperature
            now = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            sampled = now.detach() + (moved_by(0, answer.tokens) if moved else 0.0)
            ratio = (now - sampled).exp() if asked.ratio == "token" else (now - sampled).mean().exp()
            bounds = torch.tensor([1 - asked.epsilon_low, 1 + asked.high], dtype=torch.float64)
            bounded = torch.minimum(torch.maximum(ratio, bounds[0]), bounds[1])
            loss = -torch.minimum(ratio * advantage, bounded * advantage).expand(len(now))
            if asked.beta:
                gap = now.detach() + moved_by(1, answer.tokens) - now
                kl = gap.exp() - gap - 1
                loss = loss + asked.beta * (kl * ratio if asked.unbiased_kl else kl)
            cut = asked.mask_truncated and answer.stop_reason == "length"
            terms.append(0.0 * loss if cut else loss)
            counts.append(0 if cut else len(now))
    match asked.loss:
        case "grpo":
            total = torch.stack([term.mean() for term in terms]).mean()
        case "dr_grpo":
            total = torch.cat(terms).sum() / (len(terms) * LONGEST)
        case _:
            total = torch.cat(terms).sum() / sum(counts)
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


ASKED: list[dict[str, Any]] = [
    *({"loss": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo")),
    {"loss": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28, "beta": 0.05},
    {
        "loss": "grpo",
        "ratio": "sequence",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
        "beta": 0.05,
        "unbiased_kl": False,
    },
    {"loss": "dr_grpo", "ratio": "sequence", "scale_rewards": "none"},
    {"loss": "dapo", "scale_rewards": "batch", "mask_truncated": True},
    {"loss": "grpo", "temperature": 0.7, "mask_truncated": True, "beta": 0.1, "unbiased_kl": False},
]


@pytest.mark.parametrize("how", ASKED, ids=str)
@pytest.mark.parametrize("moved", [False, True], ids=["first update", "later update"])
def test_loss_and_gradients_are_those_of_trl(model: Path, tmp_path: Path, how: dict[str, Any], moved: bool) -> None:
    moved = moved or "beta" in how  # a reference that is the model itself says nothing
    asked = GrpoConfig(name="grpo", rewards=["x:y"], max_new_tokens=LONGEST, **how)
    loss, gradients = of_ours(model, asked, moved)
    expected, reference = of_formula(model, asked, moved)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert gradient_error(gradients, reference) < 1e-10
    expected, reference = of_trl(model, tmp_path, asked, moved)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert gradient_error(gradients, reference) < 5e-6  # its head goes backward in fp32


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages(scale: Any) -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    expected = advantages_of(GrpoConfig(name="grpo", rewards=["x:y"], scale_rewards=scale))
    assert torch.allclose(losses.advantages(rewards, scale), expected, rtol=1e-12)
    # TRL corrects by n / (n - 1) in fp32
    assert torch.allclose(losses.deviation(rewards, 1), nanstd(rewards, 1), rtol=1e-7)
    some = torch.tensor([[1.0, torch.nan, 0.0], [torch.nan, torch.nan, torch.nan]], dtype=torch.float64)
    found = losses.advantages(some, scale)
    assert found[0, 0] == -found[0, 2] > 0
    assert found.flatten()[[1, 3, 4, 5]].tolist() == [0.0] * 4


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage_be_their_mean_rounded(scale: Any) -> None:
    rewards = torch.tensor([[0.7] * 6, [0.7] * 5 + [torch.nan], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]], dtype=torch.float64)
    assert rewards[0].mean() != 0.7
    found = losses.advantages(rewards, scale)
    assert found[:2].tolist() == [[0.0] * 6] * 2
    assert (found[2] != 0).all()

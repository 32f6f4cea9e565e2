"""The parity table of adapters: every method beside PEFT, what is equal and by how much, and what is refused.

A row of `METHODS` gains all shared tests (`tests/adapters/test_table.py`); `make adapters` measures, and writes the
table into docs/adapters.md. Both sides read the same files of random adapters, in float64.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import yaml
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from luthier.adapters import adapted, merge, save_peft
from luthier.adapters.rows import NewTokens
from luthier.batch import Batch
from luthier.config import RunConfig
from luthier.config.sections import SGDConfig
from luthier.engine.build import build_state
from luthier.engine.evaluate import logprobs_of
from luthier.engine.state import TrainState
from luthier.engine.step import forward_backward_all
from luthier.errors import UserError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from luthier.verify.reference import widening
from tests.oracles.plain import gradient_error, plain_model, save_strong, weighted_sum
from tests.oracles.quantised import dequantised
from tests.oracles.rows import documents
from tests.parallel.cases import measure, microbatches
from tests.world import RankError, World, worlds

COLUMNS = ("forward", "gradients", "saves", "loads", "merges", "tp 2", "dp_shard 2")
LAYOUTS = {"tp 2": {"tp": 2}, "dp_shard 2": {"dp_shard": 2}}
PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

Config = TypeAdapter(RunConfig.model_fields["adapter"].annotation)


@dataclass(frozen=True)
class Method:
    """A row.

    Attributes:
        name: what people call it.
        ours: the key `adapter` of a run.
        peft: PEFT's config of the same.
        model: type of the debug model.
        changes: of that model's config.
        bound: that no deviation exceeds: the largest difference over the largest entry.
        refused: column -> words of the error by which it is refused.
        virtual: tokens that PEFT puts before every row.
        measured: module whose `parity` stands for the one here.
        note: what one should know, under the table.
        tokens: what a tokenizer makes of our `new_tokens`.
    """

    name: str
    ours: Mapping[str, Any]
    peft: peft.PeftConfig
    model: str = "llama"
    changes: Mapping[str, Any] = field(default_factory=dict)
    bound: float = 1e-10
    refused: Mapping[str, str] = field(default_factory=dict)
    virtual: int = 0
    measured: str = ""
    note: str = ""
    tokens: NewTokens | None = None

    def config(self, **fields: Any) -> Any:
        """Our config of it, other fields beside."""
        return Config.validate_python({**self.ours, **fields})

    def from_files(self, directory: Path) -> Any:
        """Our config of the adapter in PEFT's files; how the base is quantised no file says."""
        base = {key: self.ours[key] for key in ("quantize", "double_quantize") if key in self.ours}
        return Config.validate_python({"kind": self.ours.get("kind", "lora"), "start_from": str(directory), **base})


TOKENS = NewTokens((5, 200))
UNMERGEABLE = "virtual tokens, prefixes and prompts stand in the place of text and cannot be merged into weights"
BIASED = {"attention_bias": True, "mlp_bias": True}
TAKING = (
    "PEFT factorises in float32 alone, so forward and loads are compared to that; the others in float64. Gradients: "
    "from PEFT's first values. Saves: our files on the base as it was. Loads: PEFT's, converted for it."
)
QUANTISED = "PEFT beside plain weights that bitsandbytes made of its own NF4 codes."
BEGUN = f"{QUANTISED} It factorises in float32 alone, so forward is compared to that; gradients: from its first values."
SHARED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""Of a llama whose matrices two ranks can share in whole blocks of 64."""
METHODS = [
    Method(
        "LoRA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"]},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR),
        changes=BIASED,
    ),
    Method(
        "LoRA, GPT-2's layers",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"]},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
        "gpt2",
    ),
    Method(
        "LoRA beside modules trained whole",
        {"rank": 3, "alpha": 6, "target": ["attn"], "train_modules": ["norm", "lm_head"]},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION, modules_to_save=["model.norm", "lm_head"]),
        changes={"tie_word_embeddings": False},
    ),
    Method(
        "rsLoRA",
        {"rank": 3, "alpha": 6, "target": ["attn"], "rslora": True},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION, use_rslora=True),
    ),
    Method(
        "LoRA on fused experts",
        {"rank": 3, "alpha": 6, "target": ["attn", "experts"]},
        peft.LoraConfig(
            r=3,
            lora_alpha=6,
            target_modules=ATTENTION,
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ),
        "mixtral",
    ),
    Method(
        "DoRA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "dora": True},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR, use_dora=True),
        changes=BIASED,
    ),
    Method(
        "DoRA, GPT-2's layers",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "dora": True},
        peft.LoraConfig(
            r=3, lora_alpha=6, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, use_dora=True
        ),
        "gpt2",
    ),
    Method(
        "LoRA beside the embedding",
        {"rank": 3, "alpha": 6, "target": ["attn", "embed"]},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*ATTENTION, "embed_tokens"]),
        changes={"tie_word_embeddings": True},
    ),
    Method(
        "DoRA beside the embedding",
        {"rank": 3, "alpha": 6, "target": ["attn", "embed"], "dora": True},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*ATTENTION, "embed_tokens"], use_dora=True),
        changes={"tie_word_embeddings": False},
    ),
    Method(
        "PiSSA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "init": "pissa"},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR, init_lora_weights="pissa"),
        bound=1e-5,
        measured="tests.tables.taking",
        note=TAKING,
    ),
    Method(
        "OLoRA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "init": "olora"},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR, init_lora_weights="olora"),
        bound=1e-5,
        measured="tests.tables.taking",
        note=TAKING,
    ),
    Method(
        "QLoRA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "quantize": "nf4"},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR),
        changes=BIASED | SHARED,
        note=QUANTISED,
    ),
    Method(
        "QLoRA, GPT-2's layers",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "quantize": "nf4"},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
        "gpt2",
        changes={"n_embd": 128},
        note=QUANTISED,
    ),
    Method(
        "QLoRA with DoRA",
        {"rank": 3, "alpha": 6, "target": ["attn", "mlp"], "dora": True, "quantize": "nf4"},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=LINEAR, use_dora=True),
        changes=BIASED | SHARED,
        note=QUANTISED,
    ),
    Method(
        "LoftQ",
        {
            "rank": 3,
            "alpha": 3,  # PEFT's first values are for a scale of 1
            "target": ["attn", "mlp"],
            "quantize": "nf4",
            "double_quantize": False,
            "init": "loftq",
        },
        peft.LoraConfig(
            r=3,
            lora_alpha=3,
            target_modules=LINEAR,
            init_lora_weights="loftq",
            loftq_config=peft.LoftQConfig(loftq_bits=4, loftq_iter=1),
        ),
        changes=SHARED,
        bound=1e-5,
        refused=dict.fromkeys(LAYOUTS, "loftq factorises whole weights"),
        measured="tests.tables.loftq",
        note=BEGUN,
    ),
    Method(
        "LoRA beside rows of tokens, tied head",
        {"rank": 3, "alpha": 6, "target": ["attn"], "new_tokens": ["<a>", "<b>"]},
        peft.LoraConfig(r=3, lora_alpha=6, target_modules=ATTENTION, trainable_token_indices=[*TOKENS.ids]),
        changes={"tie_word_embeddings": True},
        tokens=TOKENS,
    ),
    Method(
        "LoRA beside rows of tokens, head of its own",
        {"rank": 3, "alpha": 6, "target": ["attn"], "new_tokens": ["<a>", "<b>"]},
        peft.LoraConfig(
            r=3,
            lora_alpha=6,
            target_modules=ATTENTION,
            trainable_token_indices={"embed_tokens": [*TOKENS.ids], "lm_head": [*TOKENS.ids]},
        ),
        changes={"tie_word_embeddings": False},
        tokens=TOKENS,
    ),
    Method(
        "Prompt tuning",
        {"kind": "prompt", "num_virtual_tokens": 4},
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        refused={"merges": UNMERGEABLE},
        virtual=4,
    ),
    Method(
        "Prefix tuning",
        {"kind": "prefix", "num_virtual_tokens": 4},
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        refused={"merges": UNMERGEABLE},
    ),
    Method(
        "LLaMA-Adapter",
        {"kind": "adaption_prompt", "adapter_len": 4, "adapter_layers": 1},
        peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
        refused={"merges": UNMERGEABLE},
    ),
]


def parity(method: Method, directory: Path, world: Callable[[int], World]) -> dict[str, float | str]:
    """Column -> the deviation that was measured, or why it is refused.

    Args:
        method: the row.
        directory: for what is written.
        world: of two ranks, for the layouts.

    Raises:
        AssertionError: it refuses for another reason than the row says, or trains something else than PEFT.
    """
    if method.measured:
        own: dict[str, float | str] = importlib.import_module(method.measured).parity(method, directory, world)
        return {name: own[name] for name in COLUMNS}
    with wide(method.config()):
        return _parity(method, directory, world)


def wide(adapter: Any) -> AbstractContextManager[None]:
    """Norms and routers would round to fp32 what differs in float64; so does bitsandbytes, and knows nothing else."""
    return nullcontext() if getattr(adapter, "quantize", None) else widening()


def cell(method: Method, name: str, value: Callable[[], float]) -> float | str:
    """The deviation in a column, or why it is refused.

    Raises:
        AssertionError: it is refused for another reason than the row says.
    """
    try:
        return value()
    except (UserError, RankError) as error:
        reason = method.refused.get(name)
        if reason is None or reason not in str(error):
            raise AssertionError(f"{method.name}, {name}: {error}") from error
        return reason


def _parity(method: Method, directory: Path, world: Callable[[int], World]) -> dict[str, float | str]:
    base = save_strong(debug_config(method.model, **method.changes), directory / "base")
    samples, beside = documents(), base
    if method.ours.get("quantize"):
        beside = dequantised(base, directory / "dequantised", double=method.config().double_quantize)
    theirs = peft.get_peft_model(plain(beside), method.peft, autocast_adapter_dtype=False).eval()
    scatter(theirs)
    theirs.save_pretrained(str(directory / "theirs"), save_embedding_layers=False)
    factor = 1 / sum(float(sample.weights.sum()) for sample in samples)
    expected = weighted_sum(Cut(theirs, method.virtual), samples, factor)
    expected_logprobs = of_trained(expected.logprobs)
    own = method.from_files(directory / "theirs")
    found: dict[str, float | str] = {}

    def column(name: str, value: Callable[[], float]) -> None:
        found[name] = cell(method, name, value)

    state = ready(base, own)
    assert shapes(state) == shapes(ready(base, method.config(), method.tokens)), "other files than the config asks for"

    def off(state: TrainState) -> float:
        return relative(ours(state), expected_logprobs)

    def gradients() -> float:
        outputs = forward_backward_all(state, microbatches(samples, 0, 1))
        alone.update({name: p.grad.clone() for name, p in state.trainable.items() if p.grad is not None})
        loss = sum(float(output.loss) for output in outputs)
        put_gradients(theirs)
        theirs.save_pretrained(str(directory / "gradients-theirs"), save_embedding_layers=False)
        twin = ready(base, own)
        put(twin.model, alone)
        save_peft(twin.model, directory / "gradients-ours")
        one, other = (load_file(directory / f"gradients-{who}" / FILE) for who in ("ours", "theirs"))
        return max(abs(loss / expected.loss - 1), gradient_error(one, other))

    def saves() -> float:
        save_peft(state.model, directory / "ours")
        again = peft.PeftModel.from_pretrained(
            plain(beside),
            str(directory / "ours"),
            is_trainable=not method.peft.is_prompt_learning,  # which PEFT does not go on training
            autocast_adapter_dtype=False,
        )
        again.eval()
        return relative(said(Cut(again, method.virtual)), expected_logprobs)

    def on(layout: dict[str, int]) -> float:
        worst = 0.0
        for rank in world(2).run(widened, base, layout, own):
            assert not rank["missing"]
            errors = (abs(rank["loss"] / expected.loss - 1), gradient_error(rank["gradients"], alone))
            worst = max(worst, *errors)
        return worst

    def merges() -> float:
        merge(state.model)
        assert not list(adapted(state.model))
        return off(state)

    alone: dict[str, Tensor] = {}
    column("forward", lambda: off(state))
    column("gradients", gradients)
    column("saves", saves)
    column("loads", lambda: off(ready(base, method.from_files(directory / "ours"))))
    for name, layout in LAYOUTS.items():
        column(name, lambda layout=layout: on(layout))  # type: ignore[misc]
    column("merges", merges)
    return {name: found[name] for name in COLUMNS}


FILE = "adapter_model.safetensors"


def widened(base: Path, layout: dict[str, int], adapter: Any) -> dict[str, Any]:
    """`measure` on every rank, in float64 throughout."""
    with wide(adapter):
        return measure(base, layout, documents(), lora=adapter)


class Cut(torch.nn.Module):
    """PEFT's model without what it says of the tokens that it puts before a row."""

    def __init__(self, model: Any, virtual: int) -> None:
        super().__init__()
        self.model, self.virtual = model, virtual

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = output.logits[:, self.virtual :]
        return output


def plain(base: Path) -> Any:
    """A new unmodified model in float64."""
    return plain_model(base, torch.float64)


def ready(base: Path, adapter: Any, tokens: NewTokens | None = None) -> TrainState:
    """Our model, in one process."""
    state = build_state(
        resolve(str(base)),
        adapter=adapter,
        tokens=tokens,
        optimizer=SGDConfig(name="sgd", learning_rate=0.1),
        precision="fp64",
        device=torch.device("cpu"),
    )
    state.model.eval()
    return state


@torch.no_grad()
def scatter(model: Any) -> None:
    """Random values for all that trains; lengths stay lengths."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ("lora_" in name and "magnitude" not in name) or "gate" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
        else:
            parameter.mul_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5)


@torch.no_grad()
def put(model: Any, values: Mapping[str, Tensor]) -> None:
    """Give parameters other values."""
    for name, value in values.items():
        model.get_parameter(name).copy_(value)


@torch.no_grad()
def put_gradients(model: Any) -> None:
    """Let every parameter that trains be its gradient, so that gradients can be saved as adapters are."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def shapes(state: TrainState) -> dict[str, torch.Size]:
    """What trains."""
    return {name: parameter.shape for name, parameter in state.trainable.items()}


def of_trained(logprobs: Sequence[Tensor]) -> Tensor:
    """Log-probabilities of each document, those that train."""
    return torch.cat(list(logprobs))[torch.cat([torch.from_numpy(one.weights) for one in documents()]) != 0]


def said(model: Any) -> Tensor:
    """Log-probabilities of what trains, by a plain or PEFT's model."""
    return of_trained(weighted_sum(model, documents()).logprobs)


def ours(state: TrainState) -> Tensor:
    """The same by our model."""
    return of_trained(logprobs_of(state, [Batch.pack([sample]) for sample in documents()]))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest entry."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def wrong(method: Method, found: Mapping[str, float | str]) -> list[str]:
    """Columns whose deviation exceeds the bound."""
    return [name for name, value in found.items() if not isinstance(value, str) and not value < method.bound]


def table(rows: Mapping[str, Mapping[str, float | str]]) -> str:
    """The table, its notes, and how each method is written."""
    notes: dict[str, int] = {}

    def shown(method: Method, column: str) -> str:
        value = rows[method.name][column]
        if isinstance(value, str):
            return f"–<sup>{notes.setdefault(f'refused: {value}', len(notes) + 1)}</sup>"
        return f"{'✗' if column in wrong(method, rows[method.name]) else '✓'} {f'{value:.0e}' if value else '0'}"

    lines = [f"| method | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for method in METHODS:
        mark = f"<sup>{notes.setdefault(method.note, len(notes) + 1)}</sup>" if method.note else ""
        lines.append(f"| {method.name}{mark} | {' | '.join(shown(method, column) for column in COLUMNS)} |")
    lines += ["", *(f"{number}. {note}" for note, number in notes.items())]
    lines += ["", "| method | `adapter:` |", "| --- | --- |"]
    for method in METHODS:
        written = yaml.safe_dump(dict(method.ours), default_flow_style=True, sort_keys=False, width=1000).strip()
        lines.append(f"| {method.name} | `{written}` |")
    return "\n".join(lines)


def main() -> int:
    """Measure all rows and write the page; 1 if a cell is wrong."""
    disable_progress_bar()
    warnings.simplefilter("ignore")
    rows, faults = {}, []
    with worlds() as world:
        for method in METHODS:
            with tempfile.TemporaryDirectory() as directory:
                rows[method.name] = parity(method, Path(directory), world)
            faults += [f"{method.name}: {name}" for name in wrong(method, rows[method.name])]
            print(method.name, rows[method.name], flush=True)
    begin, end = "<!-- table: made by make adapters -->", "<!-- end of table -->"
    page = PAGE.read_text(encoding="utf-8")
    made = re.sub(f"(?s){begin}.*{end}", lambda _: f"{begin}\n{table(rows)}\n{end}", page)
    PAGE.write_text(made, encoding="utf-8")
    print("\n".join(f"wrong: {fault}" for fault in faults) or f"{PAGE.name} is written; no cell is wrong")
    return bool(faults)


if __name__ == "__main__":
    from tests.tables import adapters  # ranks look for their cases under this name

    sys.exit(adapters.main())

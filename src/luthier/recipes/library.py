"""Luthier as a library: what `import luthier` offers beside the step itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from luthier.adapters import Merging, save_peft
from luthier.adapters.rows import add_tokens
from luthier.batch import Batch, Sample
from luthier.config import AdapterConfig, DataConfig, GenerationConfig, LoraConfig, OptimizerConfig, SourceConfig
from luthier.config.sections import AdamWConfig
from luthier.config.suggest import nearest
from luthier.data.loader import Rows, build_rows
from luthier.data.packing import microbatches
from luthier.data.pictures import show
from luthier.engine.build import Precision, build_state, choose_device
from luthier.engine.evaluate import Evaluation, batch_logprobs
from luthier.engine.evaluate import evaluate as measure
from luthier.engine.network import require_readable
from luthier.engine.state import TrainState
from luthier.errors import ConfigError
from luthier.hf.save import base_dtype, save_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.hf.vision.processor import open_eyes, save_reader
from luthier.hf.vision.sight import sight_of
from luthier.parallel.checkpointing import Policy
from luthier.recipes.generate import answer, stops_of


def load(
    model: str,
    *,
    adapter: AdapterConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    precision: Precision | None = None,
    device: str | None = None,
    from_scratch: bool = False,
    activation_checkpointing: Policy = "off",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> TrainState:
    """A model ready to train, with its tokenizer as `state.tokenizer`.

    Args:
        model: a Hub id, a directory, a .gguf file, package:NAME/FILE, or debug:TYPE.
        adapter: LoRA beside frozen weights; everything trains when left out.
        optimizer: AdamW at 1e-4 when left out.
        precision: fp32, bf16 or fp64; what the device is fast at when left out.
        device: cpu, cuda, ...; as of `train.device`.
        from_scratch: random weights by the model's own initialisation.
        activation_checkpointing: off, full, selective or offloaded.
        trust_remote_code: run code that the model's repository brings.
        seed: of adapters and random weights.

    Raises:
        UserError: the model cannot be found or used, or an adapter's target adapts nothing.
    """
    if optimizer is not None and optimizer.in_backward:
        what = "each call of forward_backward would take a step of its own"
        raise ConfigError(what, where="optimizer.in_backward", remedy="leave it out, or train by luthier train")
    source = resolve(model)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    named = adapter.new_tokens if isinstance(adapter, LoraConfig) else []
    state = build_state(
        source,
        adapter=adapter,
        tokens=add_tokens(tokenizer, named) if named else None,
        optimizer=optimizer or AdamWConfig(),
        precision=precision,
        device=choose_device(device),
        from_scratch=from_scratch,
        trust_remote_code=trust_remote_code,
        seed=seed,
        activation_checkpointing=activation_checkpointing,
    )
    open_eyes(source, tokenizer, trust_remote_code=trust_remote_code)
    state.tokenizer = tokenizer
    return state


def read_rows(state: TrainState, path: str, *, sequence_length: int = 1024, **source: Any) -> Rows:
    """Rows of a file, directory, glob or hf:// data set as samples for this model.

    Args:
        state: whose tokenizer is used.
        path: where the rows are.
        sequence_length: longer rows are cut.
        source: fields of `data.train` (format, column, columns, system_prompt, ...).

    Returns:
        a sequence of `Sample`, with `report` saying what became of the rows.

    Raises:
        ConfigError: there is no such field, or its value is of another type.
        DataError: the rows cannot be read.
    """
    train = [_section(SourceConfig, {"path": path, **source})]
    config = _section(DataConfig, {"train": train, "sequence_length": sequence_length})
    rows = build_rows(config, "train", state.tokenizer)
    assert isinstance(rows, Rows)
    return rows


def pack(samples: Sequence[Sample], sequence_length: int, state: TrainState) -> Iterator[Batch]:
    """Samples as microbatches of at most `sequence_length` tokens, one sample each where the model mixes documents."""
    lengths = [len(sample) for sample in samples]
    longest = max(sequence_length, *lengths) if lengths else sequence_length
    together = not state.packing_fault and not any(sample.pictures for sample in samples)
    for rows in microbatches(lengths, longest, together, 1)[0]:
        chosen = [samples[row] for row in rows]
        yield show(chosen, Batch.pack(chosen), sight_of(state.tokenizer))


def logprobs(state: TrainState, batch: Batch) -> torch.Tensor:
    """[T] log-probabilities of a microbatch's targets, without gradients or dropout; 0 where the weight is 0."""
    require_readable(state, batch)
    training = state.model.training
    state.model.eval()
    try:
        return batch_logprobs(state, batch)
    finally:
        state.model.train(training)


def evaluate(state: TrainState, samples: Iterable[Sample], *, tokens_per_batch: int = 2048) -> Evaluation:
    """Token-weighted loss and perplexity over samples, each once; sums in float64."""
    return measure(state, pack(list(samples), tokens_per_batch, state))


def generate(state: TrainState, prompt: str, *, seed: int = 0, **how: Any) -> str:
    """Answer a prompt, as a user's turn where the model has a chat template.

    Args:
        state: a model, trained or not.
        prompt: text.
        seed: of sampling.
        how: fields of `generation` (max_new_tokens, temperature, top_p, top_k).

    Raises:
        ConfigError: there is no such field, or its value is of another type.
    """
    text, _ = answer(state.model, state.tokenizer, prompt, _section(GenerationConfig, how), seed=seed)
    return text


def save(state: TrainState, directory: str | Path, *, merge: bool = False) -> Path:
    """Write what Transformers or PEFT opens: adapters as PEFT files, or the whole model.

    Args:
        state: what was trained; it may go on training.
        directory: where to.
        merge: with adapters: write the whole model, the adapters added to its weights.
    """
    if state.lora is not None and not merge:
        target = save_peft(state.model, directory, base_model=state.source.text)
        if state.tokenizer is not None:  # which may have tokens of its own
            save_reader(state.tokenizer, target)
        return target
    return save_model(
        state.model,
        directory,
        tokenizer=state.tokenizer,
        stop_tokens=stops_of(state.model, state.tokenizer),
        dtype=base_dtype(state.source),
        transform=Merging(state.model),
    )


SectionType = TypeVar("SectionType", bound=BaseModel)


def _section(kind: type[SectionType], values: dict[str, Any]) -> SectionType:
    """A section of the config from keyword arguments; what is wrong is said as of the YAML."""
    for key in values.keys() - kind.model_fields.keys():
        close = nearest(key, list(kind.model_fields))
        remedy = f"did you mean {close!r}?" if close else f"there are {', '.join(kind.model_fields)}"
        raise ConfigError("there is no such field", where=key, remedy=remedy)
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(first["msg"], where=".".join(map(str, first["loc"]))) from None

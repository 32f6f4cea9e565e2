"""LoRA on a model: which layers, what trains, and the one line that says so.

On meta, before loading, `apply_lora` puts the adapters in place; after loading, `finish_lora` settles the ties, gives
the adapters their first values, freezes the rest and finds which layers share their input. On a model that has its
weights already, `apply_lora` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luthier.adapters.experts import adapted
from luthier.adapters.init import initialise_adapters
from luthier.adapters.layer import LoraSpec
from luthier.adapters.loftq import rounds_of
from luthier.adapters.peft_config import PeftConfig, read_peft_config
from luthier.adapters.peft_files import load_part, load_peft
from luthier.adapters.principal import takes_from_base
from luthier.adapters.quantized import quantizable
from luthier.adapters.rows import SUFFIX as ROWS
from luthier.adapters.rows import NewTokens, attach_rows, initialise_rows, rows_of, tie_rows
from luthier.adapters.siblings import find_siblings
from luthier.adapters.structure import attach_all, freeze, settle_ties, trains_one_end, wholly_trained
from luthier.adapters.targets import resolve_modules, resolve_targets
from luthier.config import LoraConfig
from luthier.errors import ConfigError
from luthier.hf.anatomy import describe
from luthier.hf.linear import linear_shape
from luthier.hf.load import DTYPES


@dataclass(frozen=True, slots=True)
class LoraReport:
    """What was adapted; `str()` is the line that a run prints.

    Attributes:
        adapters: how many layers carry an adapter.
        ranks: their ranks, each once, ascending.
        targets: what was asked for; with `start_from` the last parts of the layers' names.
        trained: full names of the modules that are trained whole.
        trainable: parameters that train.
        total: all parameters, adapters included, tied ones once.
        kind: LoRA or DoRA.
        tokens: whose rows train.
        quantized: what of the base is quantised, in a line.
    """

    adapters: int
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    trained: tuple[str, ...]
    trainable: int
    total: int
    kind: str = "LoRA"
    tokens: int = 0
    quantized: str = ""

    def __str__(self) -> str:
        ranks = "/".join(str(rank) for rank in self.ranks)
        also = f", trained whole={','.join(self.trained)}" if self.trained else ""
        also += f", rows of {self.tokens} tokens" if self.tokens else ""
        what = f"{self.kind}: {self.adapters} adapters (rank={ranks}, targets={','.join(self.targets)}{also})"
        line = f"{what}; {self.trainable:,} trainable of {self.total:,}"
        return f"{line}; {self.quantized}" if self.quantized else line


def apply_lora(model: Any, config: LoraConfig, seed: int = 0, tokens: NewTokens | None = None) -> LoraReport:
    """Put adapters beside the layers that the config names and freeze everything else.

    Args:
        model: a Transformers model without adapters. On meta only the structure is made: call `finish_lora` when the
            weights are there.
        config: what to adapt and how. With `start_from` rank, alpha, rsLoRA, targets and wholly trained modules are
            those of the files, and what the config says otherwise is refused.
        seed: of the adapters' first values.
        tokens: what the tokenizer makes of `new_tokens`.

    Returns:
        what was adapted.

    Raises:
        ConfigError: something asked for adapts nothing, or contradicts `start_from`.
        ModelError: the files of `start_from` cannot be used.
    """
    if config.start_from is not None:
        _agree(config, read_peft_config(Path(config.start_from)))
        _load(model, config)
        _agree_on_modules(model, config)
        _agree_on_tokens(model, tokens)
    else:
        trained = resolve_modules(model, config.train_modules)
        alpha = config.alpha or 2.0 * config.rank
        spec = LoraSpec(config.rank, alpha, config.dropout, config.rslora, config.dora)
        names = resolve_targets(model, config.target, without=trained)
        _allow(model, names, config.init)
        attach_all(model, dict.fromkeys(names, spec), trained, DTYPES.get(config.dtype or ""))
        if rounds_of(config.init):
            model.factorised = tuple(quantizable(model))  # which `parallel.rules` leaves whole
        if tokens is not None:
            attach_rows(model, tokens, DTYPES.get(config.dtype or ""), trained)
    if any(parameter.is_meta for parameter in model.parameters()):
        freeze(model)
        return report(model, config)
    return finish_lora(model, config, seed)


def finish_lora(
    model: Any, config: LoraConfig, seed: int = 0, *, run: Callable[[], object] | None = None, part: bool = False
) -> LoraReport:
    """Make an adapted model ready to train once its weights are there.

    Args:
        model: given to `apply_lora` before; nothing on meta.
        config: the same.
        seed: of the adapters' first values.
        run: how to run the model once, to see which layers share their input; needed where it is cut into stages.
        part: the model is what this rank holds of it.

    Returns:
        what was adapted, counted again now that the ties are known.
    """
    settle_ties(model)
    tie_rows(model)
    if config.start_from is not None and part:
        load_part(model, config.start_from)
    elif config.start_from is not None:
        _load(model, config)
    else:
        initialise_adapters(model, seed, config.init)
    initialise_rows(model, fill_in=config.start_from is None)
    freeze(model)
    find_siblings(model, run)
    return report(model, config)


def report(model: Any, config: LoraConfig) -> LoraReport:
    """Count what was adapted. On meta nothing is aliased yet, but a head that is to be the embedding counts once."""
    anatomy = describe(model)
    tied = anatomy.tied and not trains_one_end(model, anatomy)
    shared = {f"{anatomy.head}.weight", f"{anatomy.head}{ROWS}"} if tied else set()
    counted = [parameter for name, parameter in model.named_parameters() if name not in shared]
    layers = dict(adapted(model))
    endings = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    return LoraReport(
        adapters=len(layers),
        ranks=tuple(sorted({layer.lora_spec.rank for layer in layers.values()})),
        targets=tuple(endings if config.start_from is not None else config.target),
        trained=wholly_trained(model),
        trainable=sum(parameter.numel() for parameter in counted if parameter.requires_grad),
        total=sum(parameter.numel() for parameter in counted),
        kind="DoRA" if any(layer.lora_spec.dora for layer in layers.values()) else "LoRA",
        tokens=len(next(iter(rows_of(model).values())).ids) if rows_of(model) else 0,
    )


def _load(model: Any, config: LoraConfig) -> None:
    assert config.start_from is not None
    dropout = config.dropout if _is_asked(config, "dropout") else None
    load_peft(model, config.start_from, dropout=dropout, dtype=DTYPES.get(config.dtype or ""))


def _allow(model: Any, names: Sequence[str], init: str) -> None:
    """Refuse ways to begin that some of these layers have not."""
    anatomy = describe(model)
    linear = {name for name, module in model.named_modules() if linear_shape(module) is not None}
    remedy = "leave init out, or name other layers in adapter.target"
    if rounds_of(init) and (others := {f"{name}.weight" for name in names} - set(quantizable(model))):
        plain = min(others).removesuffix(".weight")
        what = f"{init} begins as what quantisation loses, and {plain} is not quantised"
        raise ConfigError(what, where="adapter.init", remedy=remedy)
    if init not in ("default", "gaussian") and (other := next((name for name in names if name not in linear), None)):
        raise ConfigError(f"{init} is for linear layers, and {other} is none", where="adapter.init", remedy=remedy)
    if takes_from_base(init) and anatomy.tied and anatomy.head in names:
        what = f"{init} takes a part out of {anatomy.head}, and its weight is the embedding's too"
        raise ConfigError(what, where="adapter.init", remedy=remedy)


def _is_asked(config: LoraConfig, name: str) -> bool:
    """Whether a field says something of its own; a resolved config repeats every default."""
    return bool(getattr(config, name) != LoraConfig.model_fields[name].default)


def _agree(config: LoraConfig, files: PeftConfig) -> None:
    """Refuse what the config says about the adapter's shape where the files say something else."""
    if _is_asked(config, "init"):
        what = f"{config.init} is asked for, and the adapter in {files.directory} has its values"
        raise ConfigError(what, where="adapter.init", remedy="leave it out when starting from an adapter")
    for name, theirs in (("rank", files.rank), ("alpha", files.alpha), ("rslora", files.rslora), ("dora", files.dora)):
        if _is_asked(config, name) and getattr(config, name) != theirs:
            raise ConfigError(
                f"{getattr(config, name)} is asked for, and the adapter in {files.directory} has {theirs}",
                where=f"adapter.{name}",
                remedy="leave it out when starting from an adapter",
            )


def _agree_on_tokens(model: Any, tokens: NewTokens | None) -> None:
    there = next(iter(rows_of(model).values())).ids if rows_of(model) else ()
    if tokens is not None and tokens.ids != there:
        raise ConfigError(
            f"they have the ids {list(tokens.ids)}, and the adapter's rows are of {list(there)}",
            where="adapter.new_tokens",
            remedy="leave it out when starting from an adapter",
        )


def _agree_on_modules(model: Any, config: LoraConfig) -> None:
    there = {"target": [name for name, _ in adapted(model)], "train_modules": list(wholly_trained(model))}
    for name, resolve in (("target", resolve_targets), ("train_modules", resolve_modules)):
        if _is_asked(config, name) and resolve(model, getattr(config, name)) != there[name]:
            raise ConfigError(
                f"it asks for other modules than the adapter in {config.start_from} holds",
                where=f"adapter.{name}",
                remedy="leave it out when starting from an adapter",
            )

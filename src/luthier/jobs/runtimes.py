"""The runtimes that Luthier brings along: one a model of the catalogue, one for any model, one for any function."""

from __future__ import annotations

from collections.abc import Sequence

from luthier.config.presets import GPUS_A_NODE, Preset, presets
from luthier.config.suggest import nearest
from luthier.errors import ConfigError
from luthier.jobs.types import Framework, Runtime, RuntimeTrainer, TrainerType

ANY_MODEL = "luthier"
"""The runtime whose jobs name their own model and data."""
ANY_FUNCTION = "torch-distributed"
PREFIX, KEP_PREFIX = "luthier-", "torchtune-"
IMAGE = "ghcr.io/luthier/luthier-trainer"


def builtin(device: str = "gpu", device_count: int | None = None) -> list[Runtime]:
    """All of them.

    Args:
        device: that their nodes have: "gpu" or "cpu".
        device_count: of a node; of a runtime with a model, as many as full fine-tuning takes, when left out.
    """
    runtimes = [
        _runtime(ANY_MODEL, TrainerType.BUILTIN_TRAINER, Framework.LUTHIER, device, device_count or 1),
        _runtime(ANY_FUNCTION, TrainerType.CUSTOM_TRAINER, Framework.TORCH, device, device_count or 1),
    ]
    for preset in presets().values():
        gpus = preset.gpus("full")
        count = device_count or min(gpus, GPUS_A_NODE)
        runtime = _runtime(PREFIX + preset.name, TrainerType.BUILTIN_TRAINER, Framework.LUTHIER, device, count)
        runtime.pretrained_model = preset.model
        if device_count is None and runtime.trainer is not None:
            runtime.trainer.num_nodes = -(-gpus // GPUS_A_NODE)
        runtimes.append(runtime)
    return sorted(runtimes, key=lambda runtime: runtime.name)


def _runtime(name: str, kind: TrainerType, framework: Framework, device: str, count: int) -> Runtime:
    command = ("torchrun",) if kind is TrainerType.CUSTOM_TRAINER else ("python", "-m", "luthier.jobs.node")
    return Runtime(name, RuntimeTrainer(kind, framework, IMAGE, 1, device, count, command))


def find(name: str, known: Sequence[Runtime]) -> Runtime:
    """The runtime of a name; those of the KEP (`torchtune-llama3.2-1b`, in any case) mean the same models.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{type(name).__name__} is not a name", where="runtime", remedy="give text")
    by_name = {runtime.name: runtime for runtime in known}
    lower = name.lower()
    for candidate in (name, lower, PREFIX + lower.removeprefix(KEP_PREFIX), PREFIX + lower):
        if candidate in by_name:
            return by_name[candidate]
    meant = nearest(lower.replace(KEP_PREFIX, PREFIX), by_name)
    remedy = f"did you mean {meant}?" if meant else "`luthier runtimes` lists those there are"
    raise ConfigError(f'there is no runtime "{name}"', where="runtime", remedy=remedy)


def preset_of(runtime: Runtime) -> Preset | None:
    """The row of the catalogue behind a runtime; None where it has none."""
    for prefix in (PREFIX, KEP_PREFIX):
        if runtime.name.startswith(prefix) and (found := presets().get(runtime.name.removeprefix(prefix).lower())):
            return found
    return None

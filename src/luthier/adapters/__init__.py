"""Adapters beside frozen weights: LoRA in place, merging, PEFT's files."""

from luthier.adapters.init import first_down, initialise_adapters
from luthier.adapters.layer import LoraLayer, LoraSpec, adapted_layers, attach, detach, is_adapter_weight
from luthier.adapters.lora import LoraReport, apply_lora, finish_lora
from luthier.adapters.merge import MergeReport, Merging, merge, merged_weight
from luthier.adapters.peft_files import load_peft, save_peft
from luthier.adapters.structure import freeze, part_on_meta, untie, wholly_trained
from luthier.adapters.targets import resolve_modules, resolve_targets

__all__ = [
    "LoraLayer",
    "LoraReport",
    "LoraSpec",
    "MergeReport",
    "Merging",
    "adapted_layers",
    "apply_lora",
    "attach",
    "detach",
    "finish_lora",
    "first_down",
    "freeze",
    "initialise_adapters",
    "is_adapter_weight",
    "load_peft",
    "merge",
    "merged_weight",
    "part_on_meta",
    "resolve_modules",
    "resolve_targets",
    "save_peft",
    "untie",
    "wholly_trained",
]

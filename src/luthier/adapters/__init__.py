"""Adapters beside frozen weights: LoRA in place, merging, PEFT's files."""

from luthier.adapters.dora import layer_factor
from luthier.adapters.experts import Adapted, adapted
from luthier.adapters.init import first_down, initialise_adapters
from luthier.adapters.kinds import AdapterReport, adapter_of_files, apply_adapter, finish_adapter, save_peft
from luthier.adapters.layer import (
    LoraLayer,
    LoraSpec,
    adapted_layers,
    attach,
    detach,
    is_adapter_weight,
    split_outputs,
)
from luthier.adapters.loftq import LoftQ, rounds_of
from luthier.adapters.lora import LoraReport, apply_lora, finish_lora, report
from luthier.adapters.merge import MergeReport, Merging, merge, merged_weight
from luthier.adapters.peft_config import other_base
from luthier.adapters.peft_files import load_peft
from luthier.adapters.plus import learning_rates
from luthier.adapters.quantized import packing_of, quantizable, quantized_report, require_whole_blocks
from luthier.adapters.siblings import find_siblings, passed_by
from luthier.adapters.structure import attach_all, beside, freeze, part_on_meta, untie, wholly_trained
from luthier.adapters.targets import resolve_modules, resolve_targets

__all__ = [
    "Adapted",
    "AdapterReport",
    "LoftQ",
    "LoraLayer",
    "LoraReport",
    "LoraSpec",
    "MergeReport",
    "Merging",
    "adapted",
    "adapted_layers",
    "adapter_of_files",
    "apply_adapter",
    "apply_lora",
    "attach",
    "attach_all",
    "beside",
    "detach",
    "find_siblings",
    "finish_adapter",
    "finish_lora",
    "first_down",
    "freeze",
    "initialise_adapters",
    "is_adapter_weight",
    "layer_factor",
    "learning_rates",
    "load_peft",
    "merge",
    "merged_weight",
    "other_base",
    "packing_of",
    "part_on_meta",
    "passed_by",
    "quantizable",
    "quantized_report",
    "report",
    "require_whole_blocks",
    "resolve_modules",
    "resolve_targets",
    "rounds_of",
    "save_peft",
    "split_outputs",
    "untie",
    "wholly_trained",
]

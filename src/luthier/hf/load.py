"""A model made ready on the meta device, then filled from its checkpoint by Transformers' own loader.

Transformers builds the model without memory, `prepare` changes it (adapters, parallelism), and each weight is read
straight into its place. So the peak is the model's own size, whatever is done to it before.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from luthier.errors import ModelError, UserError
from luthier.hf.gguf_quick import quick_gguf
from luthier.hf.initialise import initialise
from luthier.hf.kinds import not_causal, sees
from luthier.hf.packing import OnTheFly, Packing
from luthier.hf.quiet import quiet
from luthier.hf.rows import attention as luthier_attention
from luthier.hf.rows.rotary import follow_documents
from luthier.hf.source import ModelSource, explain, fetch, load_config
from luthier.hf.weights import open_weights, same_bits

Prepare = Callable[[PreTrainedModel], None]
"""Changes a model in place while it is on meta; what it adds is left for the caller to initialise."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """What the hooks of one load need to know and find out."""

    weights: dict[str, Any]
    device: torch.device
    prepare: Prepare | None
    seed: int
    from_scratch: bool
    packing: Packing | None = None
    own_keys: set[str] = field(default_factory=set)
    parted: set[str] = field(default_factory=set)
    trainable: dict[str, bool] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: set[tuple[str, Any, Any]] = field(default_factory=set)


def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    prepare: Prepare | None = None,
    from_scratch: bool = False,
    seed: int = 0,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
    packing: Packing | None = None,
) -> PreTrainedModel:
    """Load a causal language model, in evaluation mode.

    Args:
        source: where it comes from.
        dtype: of weights and arithmetic: fp32, bf16 or fp64, or the torch dtype.
        device: where the weights go.
        attention: an attention implementation of Transformers; "luthier" wherever the architecture admits it when left
            out.
        prepare: called with the model on meta, before any weight is read. `requires_grad` set by it is kept. A weight
            that it unties and the checkpoint does not hold is left to it.
        from_scratch: random weights by the model's own initialisation; each module's are drawn from the seed and the
            module's name, so they do not depend on what else is in the model or where it lies.
        seed: of random weights.
        trust_remote_code: run Python code that the repository brings along.
        config: used instead of the model's own (which is otherwise loaded here).
        packing: which weights are quantised as they are read; `prepare` may fill in their names.

    Returns:
        the model, tied weights aliased, nothing left on meta.

    Raises:
        ModelError: the model cannot be found or built, or its checkpoint does not fit it; weights are named.
    """
    wanted = DTYPES[dtype] if isinstance(dtype, str) else dtype
    own = config if config is not None else load_config(source, trust_remote_code=trust_remote_code)
    base = trainable_class(source, own, trust_remote_code=trust_remote_code)
    scratch = from_scratch or source.kind == "debug"
    with ExitStack() as stack:
        stack.enter_context(quiet())
        weights: dict[str, Any] = {}
        if not scratch and not source.gguf_file:
            weights = stack.enter_context(open_weights(fetch(source, weights=True)))
        loading = _Loading(weights, torch.device(device), prepare, seed, scratch, packing)
        arguments: dict[str, Any] = {
            "config": _config_of(base, own),
            "dtype": wanted,
            "distributed_config": DistributedConfig(),
        }
        if (chosen := attention or _default_attention(base)) is not None:
            arguments["attn_implementation"] = luthier_attention.parts_attention(own, chosen)
        if wanted == torch.float64 and base._can_set_experts_implementation():
            arguments["experts_implementation"] = "eager"  # grouped matrix products refuse float64
        if source.gguf_file and not scratch:
            arguments |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
            location = source.location
        else:
            arguments["state_dict"] = weights
            location = None
        hooked = _hooked(base, loading)
        try:
            with quick_gguf(source.gguf_file):
                model: PreTrainedModel = hooked.from_pretrained(location, **arguments)
        except UserError:
            raise
        except Exception as error:
            if loading.mismatched:
                raise _mismatch(source, loading) from error
            if attention is not None and "attention" in str(error).lower():
                what = f"{base.__name__} cannot use the attention implementation {attention!r}"
                raise ModelError(what, where="train.attention", remedy="leave it out, or take sdpa or eager") from error
            raise explain(source, error, "the model") from error
    _take_off(model, hooked, base)
    if packing is not None:
        packing.finish(model)
    _finish(model, source, loading, own)
    follow_documents(model)
    return model


def model_class(
    source: ModelSource, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class that Transformers would build for a causal language model with this config, with its eyes if it has
    any that are trained here.

    Raises:
        ModelError: the type is no causal language model.
    """
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        found: Any = mapping[type(config)]
        classes: list[type[PreTrainedModel]] = list(found) if isinstance(found, list | tuple) else [found]
        return next((cls for cls in classes if cls.__name__ in (config.architectures or [])), classes[0])
    reference = (getattr(config, "auto_map", None) or {}).get(AutoModelForCausalLM.__name__)
    if reference is not None and trust_remote_code:
        return get_class_from_dynamic_module(reference, source.location, **source.hub_arguments)
    raise ModelError(
        f"{source.name} is of type {config.model_type!r}, which is no causal language model",
        where="model",
        remedy="choose a model that writes text from left to right",
    )


def trainable_class(
    source: ModelSource, config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """`model_class` of a model that a run can train.

    Raises:
        ModelError: the type is no causal language model, or its weights are quantised.
    """
    if getattr(config, "quantization_config", None) is not None and not source.gguf_file:
        remedy = "name the unquantised model"
        raise ModelError(
            f"{source.name} holds quantised weights, which cannot be trained", where="model", remedy=remedy
        )
    found = model_class(source, config, trust_remote_code=trust_remote_code)
    if (kind := not_causal(config)) is not None:
        remedy = "choose a model that writes text from left to right"
        raise ModelError(f"{source.name} is {kind}", where="model", remedy=remedy)
    return found


def build_on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model without its numbers, from its config alone, with the attention that loading gives it: for estimates, and
    for asking about its anatomy."""
    own = copy.deepcopy(_config_of(cls, config))
    if (attention := _default_attention(cls)) is not None:
        own._attn_implementation = luthier_attention.parts_attention(own, attention)
    with quiet(), torch.device("meta"), init.no_tie_weights(), init.meta_device_safe_creation_ops():
        return cls(own)


def tie_on_meta(model: PreTrainedModel) -> None:
    """Alias the weights that loading will alias, before anybody groups or shards them; on meta each stands alone."""
    for target, owner in model.all_tied_weights_keys.items():
        module, _, name = target.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(owner))


def _config_of(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that a class is built from: of a model with eyes or ears perhaps its text model's."""
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and cls.config_class is text else config


def _default_attention(cls: type[PreTrainedModel]) -> str | None:
    """ "luthier", or None for architectures that look up no attention by name."""
    return luthier_attention.register_attention() if luthier_attention.takes_attention(cls) else None


def _hooked(base: type[PreTrainedModel], loading: _Loading) -> type[PreTrainedModel]:
    """A subclass that lets us in between building and loading.

    It carries the base's name and module: Transformers reads the module's source to see which attention it may set.
    """

    def prepare_distribute_model(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    def maybe_distribute_model(cls: Any, model: PreTrainedModel, config: Any, mesh: Any) -> PreTrainedModel:
        if hasattr(model.config, "distributed_config"):
            del model.config.distributed_config  # ours was empty, and must not reach an exported config.json
        _keep_dtypes(model)
        loading.own_keys = set(model.state_dict())
        if loading.weights:
            _untie_what_differs(model, loading.weights)
        tied = set(model.all_tied_weights_keys)
        if loading.prepare is not None:
            loading.prepare(model)
            loading.parted = tied - model.all_tied_weights_keys.keys()
            # FSDP makes a class of its own, which Transformers would take for code that is not its own: it would leave
            # a tied embedding without memory, and initialise otherwise.
            type(model).__module__ = base.__module__
        loading.trainable = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
        return model

    def initialize_weights(self: PreTrainedModel) -> None:
        initialise(self, loading.seed)

    def placed(load_config: Any) -> Any:
        # not by from_pretrained's device_map, which asks for accelerate even where there is one device
        return dataclasses.replace(load_config, device_map={"": loading.device})

    def load(model: PreTrainedModel, state_dict: Any, files: Any, load_config: Any, *rest: Any) -> Any:
        state_dict = _of_this_part(model, state_dict, loading.own_keys, load_config.weight_mapping or [])
        placing = placed(load_config)
        if loading.packing is not None and placing.hf_quantizer is None:  # of GGUF it is Transformers' own
            placing = dataclasses.replace(placing, hf_quantizer=OnTheFly(model, loading.packing))
        return base._load_pretrained_model(model, state_dict, files, placing, *rest)

    def finalize(model: PreTrainedModel, load_config: Any, info: Any) -> Any:
        loading.mismatched = set(info.mismatched_keys)
        info = base._finalize_model_loading(model, placed(load_config), info)
        loading.missing, loading.unexpected = set(info.missing_keys), set(info.unexpected_keys)
        return info

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "maybe_distribute_model": classmethod(maybe_distribute_model),
        "initialize_weights": initialize_weights,
        "_load_pretrained_model": staticmethod(load),
        "_finalize_model_loading": staticmethod(finalize),
    }
    return type(base.__name__, (base,), members)


def _take_off(model: PreTrainedModel, hooked: type, base: type) -> None:
    """Let the model be of its own class again, and one that was made of ours (FSDP's) of one made of that."""
    cls = type(model)
    if cls is hooked:
        model.__class__ = base
        return
    bases = tuple(base if one is hooked else one for one in cls.__bases__)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    model.__class__ = type(cls.__name__, bases, members)


def _keep_dtypes(model: PreTrainedModel) -> None:
    """Give weights on meta the dtype that loading gives them: some stay in fp32, and who shards them must know."""
    plan = model._get_dtype_plan(model.dtype)
    for name, parameter in model.named_parameters():
        dtype = next((kept for pattern, kept in plan.items() if re.search(pattern, name)), parameter.dtype)
        parameter.data = parameter.data.to(dtype)


def _of_this_part(
    model: PreTrainedModel, weights: dict[str, Any], whole: set[str], conversions: list[Any]
) -> dict[str, Any]:
    """A checkpoint without the weights that `prepare` took out of the model; what no model would have stays in."""
    elsewhere = whole - set(model.state_dict())
    if not elsewhere or not weights:
        return weights
    known = dict.fromkeys(whole, True)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def name_of(key: str) -> str:
        name: str = rename_source_key(key, renamings, converters, model.base_model_prefix, known)[0]
        if name not in known and key in known:  # as the loader does
            name = rename_source_key(key, [], [], model.base_model_prefix, known)[0]
        return name

    return {key: value for key, value in weights.items() if name_of(key) not in elsewhere}


def _untie_what_differs(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Untie, before anything is prepared, what the config calls tied and the checkpoint holds twice, differing."""
    tied = dict(model.all_tied_weights_keys)
    if not tied:
        return
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    ends = {name.rpartition(".")[2] for pair in tied.items() for name in pair}
    found: dict[str, str] = {}
    for key in weights:
        if key.rpartition(".")[2] in ends:
            found[rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0]] = key
    for target, owner in tied.items():
        if target in found and owner in found and not same_bits(weights[found[target]], weights[found[owner]]):
            model.all_tied_weights_keys.pop(target)
            model.config.tie_word_embeddings = False
            _log.warning(
                "config.json calls %s and %s tied, but the checkpoint holds two different ones: they are kept apart",
                target,
                owner,
            )


_OTHER_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def _other_task(config: PreTrainedConfig) -> str | None:
    """The class that a checkpoint was saved from where that is one of another task, as a reward model is: its body has
    the names of the language model's, and advice about the head that is missing would make one of it that it never had.
    """
    return next((name for name in config.architectures or [] if name.endswith(_OTHER_TASKS)), None)


def _finish(model: PreTrainedModel, source: ModelSource, loading: _Loading, config: PreTrainedConfig) -> None:
    """Check that the checkpoint filled the model, and put back what loading changed."""
    if loading.mismatched:
        raise _mismatch(source, loading)
    added = set(loading.trainable) - loading.own_keys
    missing = sorted((loading.missing & loading.own_keys) - loading.parted)
    unexpected = sorted(loading.unexpected)
    if (task := _other_task(config)) and (missing or unexpected) and not loading.from_scratch:
        remedy = "name the causal language model that it was made of"
        raise ModelError(f"{source.name} is a {task}, which writes no text", where="model", remedy=remedy)
    if missing and not loading.from_scratch:
        remedy = "is the checkpoint complete, and of this model? If a head is missing and the embedding serves as one, "
        remedy += "set tie_word_embeddings to true in config.json"
        raise ModelError(f"{_names(missing)} not in the checkpoint of {source.name}", where="model", remedy=remedy)
    if unexpected and not source.gguf_file:
        remedy = "is this checkpoint of this model? A wrong architecture in config.json would show so"
        raise ModelError(f"{_names(unexpected)} in the checkpoint but not in the model", where="model", remedy=remedy)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(loading.trainable.get(name, True))
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, f"still on meta: {left}"
    for target, owner in model.all_tied_weights_keys.items():
        assert model.get_parameter(target) is model.get_parameter(owner), f"{target} is not {owner}"
    model.config._name_or_path = source.location
    if source.gguf_file and getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the blocks are unpacked, and the model is as any other
    if loading.from_scratch:
        vars(model)["_weight_conversions"] = None  # no key came from a file, so an export takes the Hub's names
    if source.kind in ("directory", "hub") and model.can_generate():
        model.generation_config = _generation_config(source, model)
    if added:
        _log.debug("%d parameters were added to %s and are left to be initialised", len(added), source.name)


def _mismatch(source: ModelSource, loading: _Loading) -> ModelError:
    name, found, expected = sorted(loading.mismatched, key=lambda item: item[0])[0]
    more = f" (and {len(loading.mismatched) - 1} more)" if len(loading.mismatched) > 1 else ""
    what = f"{name} is {list(found)} in the checkpoint of {source.name} and {list(expected)} by its config{more}"
    return ModelError(what, where="model", remedy="config.json and the weights must be of one model")


def _names(keys: list[str]) -> str:
    shown = ", ".join(keys[:3])
    rest = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{shown}{rest} {'is' if len(keys) == 1 else 'are'}"


def _generation_config(source: ModelSource, model: PreTrainedModel) -> GenerationConfig:
    directory = fetch(source, weights=False)
    if (directory / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(str(directory))
        except Exception as error:
            raise explain(source, error, "generation_config.json") from error
    assert model.generation_config is not None  # Transformers makes one from the config
    return model.generation_config

"""Any config made small: the same architecture and options, sizes of a toy.

Fields are told apart by their names, so a new architecture needs no entry here. Options that change the mathematics
(norms, rope, caps, scales, routing, tied weights) stay as they are; dropout is off. Sizes divide by two where a layout
would cut them: 4 heads on 2 key-value heads, 4 experts, at least 2 layers, and a layer of every kind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from luthier.errors import first_line
from luthier.hf.raised import RAISED_BY_MODELS

HIDDEN, LAYERS, MOST_LAYERS, VOCABULARY = 64, 2, 4, 498

_NAMES: dict[int, str] = {
    HIDDEN: "hidden_size n_embd d_model dim model_dim embedding_size word_embed_proj_dim lru_width emb_dim "
    "attention_hidden_size input_embedding_size hidden_size_global output_embedding_size backbone_hidden_size "
    "adapter_in_dim adapter_out_dim adapter_input_size nemo_conv_channels ext_pw_out_channel pronunciation_embed_dim "
    "shape_embed_dim d_rnn ple_embed_dim",
    128: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff n_inner ffn_hidden_size intermediate_size_mlp "
    "shared_intermediate_size dense_intermediate_size dim_ff mamba_d_ssm dff d_inner feed_forward_size mlp_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "expert_ffn_hidden_size block_ff_dim mlp_intermediate_size o_lora_rank shared_experts_intermediate_size "
    "router_hidden_size",
    16: "sliding_window attention_window_size attention_chunk_size window_size kv_lora_rank v_head_dim "
    "qk_head_dim index_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head "
    "mamba_head_dim mamba_headdim mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank "
    "hidden_size_per_layer_input dim_head index_n_heads compress_head_dim sliding_window_size local_attention "
    "linear_head_dim keep_window_size kv_channels rel_extent",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_n_heads mamba_chunk_size chunk_size index_topk "
    "n_mamba_heads adapter_rank laurel_rank gated_norm_rank hc_lowrank d_rel loop_gate_rank",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads linear_num_value_heads mamba_num_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_attention_heads_global linear_num_heads swa_num_attention_heads num_encoder_attention_heads "
    "heads_per_ngram o_groups",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads moe_topk moe_top_k "
    "num_experts_per_tok num_experts_per_token moe_k top_k_experts num_key_value_groups kv_n_heads",
    1: "n_group topk_group n_groups zero_expert_num mamba_n_groups num_nextn_predict_layers num_expert_group",
    0: "num_kv_shared_layers",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "num_hidden_layers_global"),
)

_STUBBORN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0}},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_kv_lora_rank": 8,
        "swa_q_lora_rank": 16,
        "swa_qk_nope_head_dim": 16,
        "swa_qk_rope_head_dim": 8,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "head_dim": 16,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "use_associative_scan": False,  # the same numbers without half a minute of compiling
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
"""What the names of the fields do not tell: sizes that a class checks against one another, and defaults it lacks."""

_log = logging.getLogger(__name__)


def shrink(
    config: PreTrainedConfig, *, layers: int = LAYERS, grouped: bool = False, **changes: Any
) -> PreTrainedConfig:
    """The config of a tiny model of the same architecture, with the same options.

    Args:
        config: of any model; not changed.
        layers: at least so many; more (up to 4) where the model has more kinds of layers.
        grouped: let two heads share their keys and values even where this config's do not, if the class can do that.
        changes: fields to set otherwise.

    Returns:
        a config of the same class, for a vocabulary of `VOCABULARY` tokens of which 0 begins and ends texts and 1 pads.

    Raises:
        Exception: whatever the class says of sizes that do not fit one another.
    """
    small = type(config)(**{**_fields(config, layers, grouped), **changes})
    small.architectures = config.architectures
    return small


def _fields(config: PreTrainedConfig, layers: int, grouped: bool) -> dict[str, Any]:
    """What to make the small config of: what differs from the class's defaults, and every size.

    Fields that the class works out of others are left to it.
    """
    mine = config.to_dict()
    default = _default(type(config))
    told = {name: value for name, value in mine.items() if name not in default or default[name] != value}
    for name in ("transformers_version", "architectures", "model_type", "dtype", "_name_or_path"):
        told.pop(name, None)
    fields = {**told, **_shrunk(mine, layers, grouped)}
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            fields[name] = {**_fields(inner, layers, grouped), "model_type": inner.model_type}
    for name, value in _STUBBORN.get(config.model_type, {}).items():
        fields[name] = {**fields[name], **value} if isinstance(value, dict) and name in config.sub_configs else value
    return fields


def _default(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    try:
        return cls().to_dict()
    except RAISED_BY_MODELS as error:  # some classes have no default
        _log.debug("%s has no default config: %s", cls.__name__, first_line(error))
        return {}


def _shrunk(values: Mapping[str, Any], layers: int, grouped: bool) -> dict[str, Any]:
    """The fields that have to change, with their new values."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name == "vocab_size" or (whole and "vocab" in name and value > 1000):
            changed[name] = VOCABULARY
        elif whole and name in _SIZES:
            changed[name] = min(_SIZES[name], value)
        elif isinstance(value, list) and value and name.removesuffix("_per_layer") in _SIZES:
            size = _SIZES[name.removesuffix("_per_layer")]
            changed[name] = [min(size, entry) if isinstance(entry, int) else entry for entry in value]
        elif isinstance(value, float) and name.rpartition("_")[2] in ("dropout", "pdrop", "prob", "layerdrop", "drop"):
            changed[name] = 0.0
        elif name == "is_decoder":
            changed[name] = True
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            changed[name] = int(name == "pad_token_id")
    changed.update(_fewer_layers({**values, **changed}, layers))
    changed.update(_head_sizes(values, grouped))
    return changed


def _head_sizes(values: Mapping[str, Any], grouped: bool) -> dict[str, Any]:
    """Sizes that must fit one another: of a head, of latent attention, of a state space mixer."""
    changed: dict[str, Any] = {}
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    latent = isinstance(values.get("kv_lora_rank"), int)
    if "num_key_value_heads" in values and (latent or kv_heads is None or (kv_heads == heads and not grouped)):
        few = min(4, heads) if isinstance(heads, int) else 4
        changed["num_key_value_heads"] = few  # heads that share nothing go on sharing nothing
    for name, size in (("n_routed_experts", 4), ("num_experts_per_tok", 2)):
        if name in values and values[name] is None:
            changed[name] = size
    if "head_dim" in values:
        head_dim = values["head_dim"]
        wide = (
            isinstance(heads, int)
            and isinstance(head_dim, int)
            and heads * head_dim > (values.get("hidden_size") or 0)  # heads wider than the stream
        )
        changed["head_dim"] = 2 * HIDDEN // 4 if wide else HIDDEN // 4
    if isinstance(values.get("qk_rope_head_dim"), int) and isinstance(values.get("head_dim"), int):
        changed["head_dim"] = 8  # latent attention calls the rotated part so
    if "expand" in values and isinstance(values.get("num_heads"), int):
        changed["head_dim"] = values["expand"] * HIDDEN // 4
    return changed


def _fewer_layers(values: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Layer counts and per-layer lists, cut to a few layers that show every kind of layer there is."""
    counts = {name: values[name] for name in _LAYER_COUNTS if isinstance(values.get(name), int)}
    total = max(counts.values(), default=0)
    lists = {n: value for n, value in values.items() if isinstance(value, list | tuple) and len(value) == total}
    if lists and total <= MOST_LAYERS:
        return {}  # few already, and a list of few entries may be of something else than layers
    chosen: list[int] = []
    seen = set()
    for index in range(total if lists else 0):
        kinds = tuple(str(value[index]) for value in lists.values())
        if kinds not in seen and len(chosen) < MOST_LAYERS:
            seen.add(kinds)
            chosen.append(index)
    chosen += [index for index in range(total) if index not in chosen][: max(0, least - len(chosen))]
    layers = sorted(chosen)
    changed: dict[str, Any] = {name: min(value, len(layers)) if value else value for name, value in counts.items()}
    for name, value in lists.items():
        changed[name] = [value[index] for index in layers]
    return changed

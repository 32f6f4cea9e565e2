"""`debug:TYPE`: a tiny model of any causal type that Transformers knows, with a tokenizer, made without any download.

The type's own default config is shrunk by the names of its fields, so a new architecture needs no entry here. Options
that change the mathematics (norms, rope, caps, scales, routing) stay as the type has them; dropout is off.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedTokenizerFast

from luthier.errors import ModelError
from luthier.hf.quiet import quiet

HIDDEN, LAYERS, MOST_LAYERS = 64, 2, 4

_NAMES: dict[int, str] = {
    HIDDEN: "hidden_size n_embd d_model dim model_dim embedding_size word_embed_proj_dim lru_width emb_dim "
    "attention_hidden_size input_embedding_size hidden_size_global",
    128: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff n_inner ffn_hidden_size intermediate_size_mlp "
    "shared_intermediate_size dense_intermediate_size dim_ff mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
    "expert_ffn_hidden_size block_ff_dim mlp_intermediate_size o_lora_rank",
    16: "sliding_window attention_window_size attention_chunk_size window_size kv_lora_rank v_head_dim qk_head_dim "
    "index_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim "
    "mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank hidden_size_per_layer_input dim_head "
    "compress_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim mamba_n_heads mamba_chunk_size chunk_size index_topk "
    "n_mamba_heads",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads linear_num_value_heads mamba_num_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_attention_heads_global",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads index_n_heads moe_topk moe_top_k "
    "num_experts_per_tok num_experts_per_token moe_k top_k_experts num_key_value_groups",
    1: "n_group topk_group n_groups zero_expert_num mamba_n_groups num_nextn_predict_layers",
    0: "num_kv_shared_layers",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "num_hidden_layers_global"),
)


def causal_types() -> tuple[str, ...]:
    """Every model type that may stand behind `debug:`, in alphabetical order."""
    return tuple(sorted(kind for kind, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING))


def known_type(model_type: str) -> str:
    """The type itself.

    Raises:
        ModelError: Transformers has no causal language model of this type; names the nearest one.
    """
    known = causal_types()
    if model_type in known:
        return model_type
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.3)
    remedy = f"did you mean debug:{near[0]}?" if near else f"there are {len(known)}, debug:llama among them"
    raise ModelError(f"Transformers has no causal model type {model_type!r}", where="model", remedy=remedy)


def debug_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model of this type, for the debug tokenizer's vocabulary.

    Args:
        model_type: a name that Transformers' config registry knows ("qwen3").
        changes: fields to set otherwise.

    Raises:
        ModelError: no such type, or its config cannot be shrunk.
    """
    kind = known_type(model_type)
    cls = CONFIG_MAPPING[kind]
    tokenizer = debug_tokenizer()
    special = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        with quiet():
            default = cls()
            config = cls(**{**_shrunk(default.to_dict(), special), **changes})
    except Exception as error:
        reason = " ".join(str(error).split())
        remedy = "debug:llama, debug:qwen3 and debug:mixtral do"
        raise ModelError(f"no tiny {kind} can be made: {reason}", where=f"debug:{kind}", remedy=remedy) from error
    config.architectures = None
    return config


def _shrunk(default: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a default config that have to change, with their new values."""
    changed: dict[str, Any] = {}
    for name, value in default.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in special:
            changed[name] = special[name]
        elif whole and "vocab_size" in name and value > 1000:
            changed[name] = special["vocab_size"]  # vocabularies beside the main one
        elif whole and name in _SIZES:
            changed[name] = min(_SIZES[name], value)
        elif isinstance(value, float) and name.rpartition("_")[2] in ("dropout", "pdrop", "prob", "layerdrop", "drop"):
            changed[name] = 0.0
        elif name == "is_decoder":
            changed[name] = True
        elif isinstance(value, dict) and "model_type" in value:
            changed[name] = {**_shrunk(value, special), "model_type": value["model_type"]}
    changed.update(_fewer_layers(default))
    changed.update(_head_sizes(default))
    return changed


def _head_sizes(default: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that must fit one another: of a head, of latent attention, of a state space mixer."""
    changed: dict[str, Any] = {}
    latent = isinstance(default.get("kv_lora_rank"), int)
    if "num_key_value_heads" in default and (latent or default["num_key_value_heads"] is None):
        changed["num_key_value_heads"] = 4
    for name, size in (("n_routed_experts", 4), ("num_experts_per_tok", 2)):
        if name in default and default[name] is None:
            changed[name] = size
    if "head_dim" in default:
        heads, head_dim = default.get("num_attention_heads"), default["head_dim"]
        wide = (
            isinstance(heads, int)
            and isinstance(head_dim, int)
            and heads * head_dim > (default.get("hidden_size") or 0)  # heads wider than the stream
        )
        changed["head_dim"] = 2 * HIDDEN // 4 if wide else HIDDEN // 4
    if isinstance(default.get("qk_rope_head_dim"), int) and isinstance(default.get("head_dim"), int):
        changed["head_dim"] = 8  # latent attention calls the rotated part so
    if "expand" in default and isinstance(default.get("num_heads"), int):
        changed["head_dim"] = default["expand"] * HIDDEN // 4
    return changed


def _fewer_layers(default: Mapping[str, Any]) -> dict[str, Any]:
    """Layer counts and per-layer lists, cut to 2 to 4 layers that show every kind of layer the type has."""
    counts = {name: default[name] for name in _LAYER_COUNTS if isinstance(default.get(name), int)}
    total = max(counts.values(), default=0)
    lists = {
        name: value
        for name, value in default.items()
        if isinstance(value, list | tuple) and total > MOST_LAYERS and len(value) == total
    }
    chosen: list[int] = []
    seen = set()
    for index in range(total if lists else 0):
        kinds = tuple(str(value[index]) for value in lists.values())
        if kinds not in seen and len(chosen) < MOST_LAYERS:
            seen.add(kinds)
            chosen.append(index)
    chosen += [index for index in range(total) if index not in chosen][: max(0, LAYERS - len(chosen))]
    layers = sorted(chosen)
    changed: dict[str, Any] = {name: min(value, len(layers)) if value else value for name, value in counts.items()}
    changed.update({name: [value[index] for index in layers] for name, value in lists.items()})
    return changed


_TEXT = """
The model reads the text and answers in the form that it was shown. A question is asked, an answer is given, and the
next question follows. What is the name of the town by the river? The name of the town is written on the old stone
bridge. How many people live there? About three thousand people live there, and most of them work in the mill, in the
school or on the land. When the water is high the road is closed and they go over the hill. You are a helpful assistant.
I do not know that, but I can tell you where to look: ask at the station, or read the book that the teacher wrote.
Numbers such as 1, 2, 10, 12, 100 and 2024 stand in the text, and so do names like Anna, Ben, Clara and David.
"""

CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "Tools: {{ tools | tojson }}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>' + (call | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""ChatML with tools, without generation tags: what most models' templates look like."""


def debug_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 500 tokens with a ChatML template; every call makes a new, equal one.

    Any text survives the way there and back. It adds no BOS by itself; "<|im_end|>" ends turns, "<|endoftext|>" texts.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _backend() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=508,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(_TEXT.split("\n"), trainer)
    return str(backend.to_str())

"""Prompts and prefixes in PEFT's files, both ways.

The fields are those of PEFT 0.21 (https://huggingface.co/docs/peft/package_reference/prompt_tuning, .../prefix_tuning,
.../llama_adapter); PEFT itself is not needed. Virtual tokens and prefixes are one tensor, `prompt_embeddings`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from luthier.adapters.aside import aside_of, rename
from luthier.adapters.peft_config import CONFIG_FILE, WEIGHT_FILES, find_config, read_tensors
from luthier.adapters.peft_files import PREFIX as PEFT
from luthier.adapters.prompt import VirtualTokens, adaptions_of, key_heads, prefixes_of
from luthier.adapters.rows import whole
from luthier.errors import ModelError
from luthier.hf.gather import reshard
from luthier.hf.shards import fill
from luthier.hf.together import Group, rank_in, together

EMBEDDINGS = "prompt_embeddings"
KINDS = {"PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix", "ADAPTION_PROMPT": "adaption_prompt"}


@dataclass(frozen=True, slots=True)
class LearnedFiles:
    """What `adapter_config.json` says.

    Attributes:
        directory: where the files lie.
        kind: prompt, prefix or adaption_prompt.
        sizes: fields of the config of this kind.
    """

    directory: Path
    kind: str
    sizes: dict[str, int]


def kind_of_files(directory: Path) -> str:
    """lora, prompt, prefix or adaption_prompt; "lora" for all that is none of the others."""
    try:
        raw = json.loads(find_config(directory).read_text(encoding="utf-8"))
        return KINDS.get(raw.get("peft_type"), "lora")
    except (OSError, ValueError, AttributeError):
        return "lora"  # whose reader says what is wrong


def read_learned(directory: Path) -> LearnedFiles:
    """Read `adapter_config.json`.

    Raises:
        ModelError: there is none, or it is of another kind.
    """
    file = find_config(directory)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        kind = KINDS.get(raw.get("peft_type"))
        if kind == "adaption_prompt":
            sizes = {"adapter_len": int(raw["adapter_len"]), "adapter_layers": int(raw["adapter_layers"])}
        elif kind is not None:
            sizes = {"num_virtual_tokens": int(raw["num_virtual_tokens"])}
        else:
            what = f"it holds an adapter of type {raw.get('peft_type')}"
            raise ModelError(what, where=str(file), remedy=f"here {', '.join(KINDS)} can be read")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"it cannot be read, or a field is missing ({error})", where=str(file)) from error
    if (raw.get("num_transformer_submodules") or 1) != 1:
        raise ModelError("it is for an encoder and a decoder", where=str(file))
    return LearnedFiles(file.parent, kind, sizes)


def load_learned(model: Any, directory: Path) -> None:
    """Read values into what was put in place.

    Args:
        model: whole, or what this rank holds of it.
        directory: what PEFT, or `save_learned`, wrote.

    Raises:
        ModelError: the files cannot be read or do not fit.
    """
    files = read_learned(directory)
    where = str(files.directory)
    found = read_tensors(files.directory)
    wanted = dict(_places(model, found.get(EMBEDDINGS)))
    if not wanted or set(found) != set(wanted if files.kind == "adaption_prompt" else [EMBEDDINGS]):
        odd = sorted(set(found) ^ set(wanted))[0] if wanted else EMBEDDINGS
        raise ModelError(f"the keys of the weights are not those of this model and kind ({odd})", where=where)
    for key, (place, value) in wanted.items():
        whole = found[key] if value is None else value
        shape = list(place.shape)
        if list(whole.shape) != shape and whole.numel() != place.numel():
            remedy = "is this the base that it was trained on?"
            raise ModelError(f"{key} is {list(whole.shape)}, and the model takes {shape}", where=where, remedy=remedy)
        fill(place, whole.reshape(shape).to(place.dtype))


def _places(model: Any, embeddings: Tensor | None) -> list[tuple[str, tuple[Tensor, Tensor | None]]]:
    """(key, (parameter, its whole value where the file has it as a part of `embeddings`))."""
    table = model.get_input_embeddings()
    if isinstance(own := table._modules.get("virtual_tokens"), VirtualTokens):
        return [(EMBEDDINGS, (own.prompt, embeddings))]
    layers = list(prefixes_of(model))
    if layers and embeddings is not None:
        found: list[tuple[str, tuple[Tensor, Tensor | None]]] = []
        parts = embeddings.chunk(2 * len(layers), 1) if embeddings.shape[1] % (2 * len(layers)) == 0 else []
        for (name, prefix), keys, values in zip(layers, parts[::2], parts[1::2], strict=False):
            assert prefix.keys is not None, "files are read into a prefix without a network"
            assert prefix.values is not None
            found += [(f"{name}.keys", (prefix.keys, keys.T)), (f"{name}.values", (prefix.values, values.T))]
        return found
    return [
        (f"{PEFT}{name}.adaption_{key}", (getattr(own, key), None))
        for name, own in adaptions_of(model)
        for key in ("prompt", "gate")
    ]


@torch.no_grad()
def _tensors(model: Any) -> dict[str, Tensor]:
    """key -> whole tensor as PEFT files it, on the CPU; all ranks call it."""
    table = model.get_input_embeddings()
    if isinstance(own := table._modules.get("virtual_tokens"), VirtualTokens):
        return {EMBEDDINGS: _whole(own.prompt)}
    if hasattr(model, "prompt_encoder"):
        encoder = model.prompt_encoder
        matrix, bias, last, shift = (_whole(p) for p in encoder.transform.parameters())
        inner = torch.tanh(_whole(encoder.embedding.weight) @ matrix.T + bias)
        return {EMBEDDINGS: inner @ last.T + shift}
    layers = [prefix for _, prefix in prefixes_of(model)]
    if layers:
        parts = [_whole(half).T for one in layers for half in (one.keys, one.values) if half is not None]
        return {EMBEDDINGS: torch.cat(parts, 1)}
    found = {}
    for name, one in adaptions_of(model):
        found[f"{PEFT}{name}.adaption_prompt"] = _whole(one.prompt)[None]
        found[f"{PEFT}{name}.adaption_gate"] = _whole(one.gate)
    return found


def _whole(parameter: Tensor) -> Tensor:
    return whole(parameter).cpu()


def save_learned(
    model: Any,
    directory: str | Path,
    *,
    base_model: str | None = None,
    revision: str | None = None,
    group: Group | None = None,
) -> Path:
    """Write what learns in the place of text as PEFT does.

    Args:
        model: what is to be saved is in place; whole, or what this rank holds of it.
        directory: made if it is not there.
        base_model: name or path of the base, for whoever loads the files.
        revision: its revision on the Hub.
        group: all ranks that hold parts of the model, all of which call this; None in one process.

    Returns:
        the directory.
    """
    reshard(model)
    tensors = {key: value.contiguous() for key, value in _tensors(model).items()}
    content = {**_config(model, tensors), "base_model_name_or_path": base_model, "revision": revision}
    target = Path(directory)
    with together(group):
        if rank_in(group) == 0:
            target.mkdir(parents=True, exist_ok=True)
            for stale in (CONFIG_FILE, WEIGHT_FILES[1]):
                (target / stale).unlink(missing_ok=True)
            weights, config = target / WEIGHT_FILES[0], target / CONFIG_FILE
            save_file(tensors, aside_of(weights))
            rename(aside_of(weights), weights)
            aside_of(config).write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
            rename(aside_of(config), config)
    return target


def _config(model: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    usual = {"auto_mapping": None, "inference_mode": True, "peft_version": "0.21.2", "task_type": "CAUSAL_LM"}
    config = model.config.get_text_config()
    if EMBEDDINGS not in tensors:
        layers = [one for _, one in adaptions_of(model)]
        return usual | {
            "peft_type": "ADAPTION_PROMPT",
            "adapter_len": len(layers[0].prompt),
            "adapter_layers": len(layers),
            "target_modules": "self_attn",
        }
    shared = usual | {
        "num_virtual_tokens": len(tensors[EMBEDDINGS]),
        "num_layers": config.num_hidden_layers,
        "num_transformer_submodules": 1,
    }
    if not any(True for _ in prefixes_of(model)):
        return shared | {
            "peft_type": "PROMPT_TUNING",
            "token_dim": tensors[EMBEDDINGS].shape[1],
            "num_attention_heads": config.num_attention_heads,
            "prompt_tuning_init": "RANDOM",
            "prompt_tuning_init_text": None,
            "tokenizer_name_or_path": None,
            "tokenizer_kwargs": None,
        }
    heads, dim = key_heads(model)
    return shared | {
        "peft_type": "PREFIX_TUNING",
        "token_dim": heads * dim,
        "num_attention_heads": heads,
        "encoder_hidden_size": heads * dim,
        "prefix_projection": False,  # what is saved is what a network has made
        "init_weights": None,
    }

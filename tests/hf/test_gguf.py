"""GGUF files: the weights that plain Transformers unpacks, bit for bit, and an export that is a plain model again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoModelForCausalLM

from luthier.hf.load import load_model
from luthier.hf.save import base_dtype, save_model
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer, render

IDS = torch.arange(4, 40)[None]
HIDDEN, MLP, HEADS, KV, LAYERS = 64, 128, 4, 2, 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in Q4_1 with a byte tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    random = np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", "t", *"0123456789", *(f"t{i}" for i in range(10)), *"abcdefghijklmnopqrsuvwxyz"]
    tokens += [f"<{i}>" for i in range(64 - len(tokens))]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["t 1"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 61)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}t1{{ m.content }}</s>{% endfor %}")
    shapes = {"token_embd": (len(tokens), HIDDEN)}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        shapes |= {at + "attn_q": (HIDDEN, HIDDEN), at + "attn_output": (HIDDEN, HIDDEN)}
        shapes |= {at + "attn_k": (KV * HIDDEN // HEADS, HIDDEN), at + "attn_v": (KV * HIDDEN // HEADS, HIDDEN)}
        shapes |= {at + "ffn_gate": (MLP, HIDDEN), at + "ffn_up": (MLP, HIDDEN), at + "ffn_down": (HIDDEN, MLP)}
        shapes |= {at + "attn_norm": (HIDDEN,), at + "ffn_norm": (HIDDEN,)}
    shapes["output_norm"] = (HIDDEN,)
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_plain_transformers(file: Path, dtype: torch.dtype) -> None:
    plain = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=dtype)
    ours = load_model(resolve(str(file)), dtype=dtype, attention="sdpa")
    assert torch.equal(ours(IDS).logits, plain(IDS).logits)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert all(p.requires_grad and p.dtype == dtype for p in ours.parameters())


def test_the_export_is_a_plain_model_again(file: Path, tmp_path: Path) -> None:
    source = resolve(str(file))
    model = load_model(source, attention="eager")
    tokenizer = load_tokenizer(source)
    assert render(tokenizer, [{"role": "user", "content": "t1"}])[-1] == 2
    assert base_dtype(source) is None
    save_model(model, tmp_path / "out", tokenizer=tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(plain(IDS).logits, model(IDS).logits)
    text = (tmp_path / "out" / "config.json").read_text()
    assert "quantization" not in text
    assert "gguf" not in text + (tmp_path / "out" / "tokenizer_config.json").read_text()
    again = load_tokenizer(resolve(str(tmp_path / "out")))
    assert again.chat_template == tokenizer.chat_template
    assert again("t1 t2")["input_ids"] == tokenizer("t1 t2")["input_ids"]

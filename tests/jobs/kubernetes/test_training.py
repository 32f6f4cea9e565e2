"""A whole fine-tune on a cluster whose pods are processes: fetched, trained, followed, taken elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.jobs import (
    BuiltinTrainer,
    DatasetInitializer,
    Initializer,
    LuthierConfig,
    ModelExporter,
    TrainerClient,
)
from tests.jobs.kubernetes.played import config_of, played_cluster


def test_a_model_is_trained_and_taken_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luthier.jobs.backends.kubernetes._PAUSE", 0.05)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"q {i}", "completion": f"a {i}"}) + "\n" for i in range(16)))
    config = LuthierConfig(
        model="debug:llama",
        data={"sequence_length": 64},
        train={"steps": 2, "rows_per_step": 4, "device": "cpu"},
    )
    with played_cluster(tmp_path) as cluster:
        client = TrainerClient(config_of(cluster))
        name = client.train(
            runtime="luthier",
            initializer=Initializer(dataset=DatasetInitializer(f"file://{rows}")),
            trainer=BuiltinTrainer(config),
            exporter=ModelExporter(f"file://{tmp_path}/tuned"),
        )
        lines = list(client.get_job_logs(name, follow=True))
        job = client.wait_for_job_status(name, timeout=240, polling_interval=0.1)
    assert [(step.name, step.status) for step in job.steps] == [
        ("dataset-initializer", "Complete"),
        ("node-0", "Complete"),
        ("exporter", "Complete"),
    ]
    assert any(line.startswith("step 2/2") for line in lines)
    assert job.trainer_status is not None
    assert job.trainer_status.progress_percentage == 100
    assert job.trainer_status.metrics["step"] == 2
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "tuned").iterdir()
    }

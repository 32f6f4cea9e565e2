"""The code of KEP-2401 as it stands there, on this machine: a Hub on loopback has a tiny model under the names it uses.

Changed are imports, the token, and the client that the KEP does not define.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from luthier.hf.debug.tiny import debug_config, debug_tokenizer
from luthier.jobs import (
    BuiltinTrainer,
    DataFormat,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    Runtime,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainerClient,
)
from tests.oracles.hub import hub

ALPACA = [
    {"instruction": f"Add one to {n}.", "input": "", "output": str(n + 1), "text": "whole"} for n in range(5)
]  # fmt: skip


@pytest.fixture
def hub_of_the_kep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`meta-llama/Llama-3.2-1B-Instruct` and `tatsu-lab/alpaca`, both tiny."""
    model = tmp_path / "hub" / "models" / "meta-llama" / "Llama-3.2-1B-Instruct"
    data = tmp_path / "hub" / "datasets" / "tatsu-lab" / "alpaca" / "data"
    model.mkdir(parents=True)
    data.mkdir(parents=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(debug_config("llama")).save_pretrained(model)
    debug_tokenizer().save_pretrained(str(model))
    (model / "original.pth").write_bytes(b"what nobody asked for")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ALPACA), data / "train-00000-of-00001-a09b74b3ef9c3b56.parquet"
    )
    (data.parent / "README.md").write_text("# alpaca\n")
    (data.parent / "dataset_infos.json").write_text("{}")
    monkeypatch.setenv("LUTHIER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with hub(tmp_path / "hub") as (endpoint, asked):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield asked
        client = TrainerClient()
        for job in client.list_jobs():
            client.delete_job(job.name)


def workspace(tmp_path: Path, name: str) -> Path:
    (found,) = (tmp_path / "home" / "jobs").glob(f"{name}-*/workspace")
    return found


@pytest.mark.soak
def test_the_example_of_the_proposal(hub_of_the_kep, tmp_path):
    job_id = TrainerClient().train(
        runtime=Runtime(
            name="torchtune-llama3.2-1b",
        ),
        initializer=Initializer(
            dataset=HuggingFaceDatasetInitializer(
                storage_uri="tatsu-lab/alpaca/data",
            ),
            model=HuggingFaceModelInitializer(
                storage_uri="hf://meta-llama/Llama-3.2-1B-Instruct",
                access_token="<YOUR_HF_TOKEN>",
            ),
        ),
        trainer=BuiltinTrainer(
            config=TorchTuneConfig(
                batch_size=1,
                dataset_preprocess_config=TorchTuneInstructDataset(
                    source=DataFormat.PARQUET,
                ),
                dtype="bf16",
                epochs=1,
                num_nodes=5,
                peft_config=LoraConfig(
                    lora_rank=64,
                    lora_alpha=128,
                ),
            ),
        ),
    )
    job = TrainerClient().wait_for_job_status(job_id, polling_interval=0.2)
    nodes = [f"node-{number}" for number in range(5)]
    assert [step.name for step in job.steps] == ["dataset-initializer", "model-initializer", *nodes]
    assert {step.status for step in job.steps} == {"Complete"}
    assert job.trainer_status.metrics["step"] == len(ALPACA)  # a row a step
    assert job.trainer_status.progress_percentage == 100
    place = workspace(tmp_path, job_id)
    assert not (place / "model" / "original.pth").exists()
    adapter = place / "output" / "export"
    assert (adapter / "adapter_model.safetensors").is_file()
    assert '"r": 64' in (adapter / "adapter_config.json").read_text()


@pytest.mark.soak
def test_a_runtime_alone(hub_of_the_kep, tmp_path):
    client = TrainerClient()
    # By default we can fine-tune models without any additional configurations from users
    job_id = TrainerClient().train(
        runtime=client.get_runtime("torchtune-llama3.2-1b"),
    )
    client.wait_for_job_status(job_id, polling_interval=0.2)
    export = workspace(tmp_path, job_id) / "output" / "export"
    model = AutoModelForCausalLM.from_pretrained(export)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(weight.numel() for weight in model.parameters()) > 1000


def test_list_runtimes_fills_every_column(hub_of_the_kep):
    runtimes = TrainerClient().list_runtimes()
    llama = next(runtime for runtime in runtimes if runtime.name == "luthier-llama3.1-8b")
    assert llama.pretrained_model == "meta-llama/Llama-3.1-8B-Instruct"
    assert llama.trainer_type == "BuiltinTrainer"
    assert (llama.trainer.framework, llama.trainer.accelerator_count) == ("luthier", 1)

"""What Kubeflow's SDK and Trainer say to `tune`, and what overrides after our own command say, become a run."""

from __future__ import annotations

from typing import Any

import pytest

from luthier.errors import ConfigError
from luthier.jobs.asked import Asked
from luthier.jobs.build import build
from luthier.jobs.pod import overridden
from luthier.jobs.runtimes import builtin
from luthier.jobs.trainers import BuiltinTrainer, LoraConfig, TorchTuneConfig, TorchTuneInstructDataset
from luthier.jobs.tune import parsed, spec_of

RUN = ["run", "--rdzv_endpoint=job-node-0-0.job:29500", "full_finetune_distributed", "--config", "llama3_2/1B_full"]
FIXED = ["output_dir=/workspace/output", "tokenizer.path=/workspace/model/original/tokenizer.model"]
ALONE = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}


def config_of(*words: str, environment: dict[str, str] | None = None) -> Any:
    return spec_of(parsed([*RUN, *FIXED, *words]), environment or ALONE).config


def test_it_is_the_job_that_our_own_sdk_makes() -> None:
    words = [
        "dtype=bf16", "batch_size=8", "epochs=2", "loss=torchtune.modules.loss.CEWithChunkedOutputLoss",
        "model.apply_lora_to_mlp=True", "model.lora_rank=4", "model.lora_alpha=8", "model.lora_dropout=0.0",
        "model.lora_attn_modules=[q_proj,v_proj]",
        "dataset=torchtune.datasets.instruct_dataset", "dataset.source=json", "dataset.split=train[:10%]",
        "dataset.train_on_input=True", "dataset.new_system_prompt=x=y: [z] {w}",
        "dataset.column_map={'input': 'question', 'output': 'answer'}",
    ]  # fmt: skip
    config = TorchTuneConfig(
        dtype="bf16",
        batch_size=8,
        epochs=2,
        peft_config=LoraConfig(
            apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8, lora_dropout=0.0, lora_attn_modules=["q_proj", "v_proj"]
        ),
        dataset_preprocess_config=TorchTuneInstructDataset(
            source="json",
            split="train[:10%]",
            train_on_input=True,
            new_system_prompt="x=y: [z] {w}",
            column_map={"input": "question", "output": "answer"},
        ),
    )
    (runtime,) = [it for it in builtin("gpu", 1) if it.name == "luthier-llama3.2-1b"]
    ours = build(Asked("kubernetes", [runtime], runtime.name, trainer=BuiltinTrainer(config)))
    assert config_of(*words) == ours.config


def test_a_lora_of_the_feed_forward_layers_is_no_full_fine_tune() -> None:
    """Kubeflow looks for lora_attn_modules alone, which its SDK leaves out when it is empty."""
    assert config_of("model.apply_lora_to_mlp=True", "model.lora_rank=4")["adapter"]["target"] == ["mlp"]


@pytest.mark.parametrize(
    ("words", "path", "form"),
    [
        ([], "dataset", "instruct"),
        (["dataset.data_dir=/workspace/dataset/."], "dataset", None),
        (["dataset.data_dir=/workspace/dataset/v1.0"], "dataset/v1.0", None),
        (["dataset.data_files=/workspace/dataset/a/b.json", "dataset.source=json"], "dataset/a/b.json", "instruct"),
    ],
)
def test_rows_are_where_the_initializer_has_put_them(words: list[str], path: str, form: str | None) -> None:
    (source,) = config_of(*words)["data"]["train"]
    assert (source["path"], source.get("format")) == (path, form)


def test_processes_and_meeting_are_what_the_plugin_says() -> None:
    spec = spec_of(parsed(RUN), {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"})
    assert (spec.num_nodes, spec.nproc_per_node) == (2, 4)
    assert spec_of(parsed(RUN), {"PET_NPROC_PER_NODE": "auto"}).nproc_per_node == "auto"
    assert parsed(RUN).meeting == ("job-node-0-0.job", "29500")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "tune: there is no such command; tune run is all that there is"),
        (["run", "recipe"], "tune: --config: is missing; name a model, as llama3_2/1B_full"),
        (["run", "recipe", "--config", "phi4/14B_full"], 'tune: --config: there is no model for "phi4/14B_full"'),
        ([*RUN, "--nnodes=2"], "tune: --nnodes=2: is no option that Kubeflow gives"),
        ([*RUN, "bach_size=8"], "tune: bach_size: is no key that Kubeflow's SDK writes; did you mean batch_size?"),
        ([*RUN, "batch_size=many"], 'tune: batch_size: cannot be read from "many"'),
        ([*RUN, "model.lora_rank=True"], 'tune: model.lora_rank: cannot be read from "True"'),
        ([*RUN, "dataset=mine.dataset"], 'tune: dataset: "mine.dataset" is not torchtune.datasets.instruct_dataset'),
    ],
)
def test_what_it_does_not_know_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(words)
    assert str(caught.value) == said


def test_values_are_checked_as_everywhere() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.config\.batch_size: .*0"):
        config_of("batch_size=0")


def test_overrides_of_a_run_are_read_as_their_fields_types() -> None:
    run = {"model": "model", "data": {"train": [{"path": "dataset"}]}, "output": "output", "train": {"epochs": 1}}
    changed = overridden(run, ["optimizer.learning_rate=1e-3", "data.train.system_prompt=a=[b]", "train.epochs=2"])
    assert changed["optimizer"]["learning_rate"] == 1e-3
    assert changed["data"]["train"][0]["system_prompt"] == "a=[b]"
    assert changed["train"]["epochs"] == 2
    with pytest.raises(ConfigError, match="optimiser"):
        overridden(run, ["optimiser.learning_rate=1"])

"""Names and fields, against the SDK of Kubeflow itself."""

from __future__ import annotations

import dataclasses
import enum
import warnings

import pytest

import luthier.jobs as ours
from luthier.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kubeflow.trainer as theirs
    from kubeflow.trainer import options as their_options
    from kubeflow.trainer.types import types as their_types

CLASSES = [
    *("Runtime", "RuntimeTrainer", "Initializer", "HuggingFaceDatasetInitializer", "HuggingFaceModelInitializer"),
    *("S3DatasetInitializer", "S3ModelInitializer", "BuiltinTrainer", "CustomTrainer", "CustomTrainerContainer"),
    *("TorchTuneConfig", "LoraConfig", "TorchTuneInstructDataset", "TrainJobTemplate", "Step", "TrainJob", "Event"),
]
OPTIONS = [
    *("Name", "Labels", "Annotations", "ActiveDeadlineSeconds", "TrainerCommand", "TrainerArgs", "RuntimePatch"),
    *("TrainingRuntimeSpecPatch", "JobSetTemplatePatch", "JobSetSpecPatch", "ReplicatedJobPatch", "JobTemplatePatch"),
    *("JobSpecPatch", "PodTemplatePatch", "PodSpecPatch", "ContainerPatch"),
]
KEP = {
    "CustomTrainer": ["func", "func_args", "packages_to_install", "pip_index_url", "num_nodes", "resources_per_node"],
    "TorchTuneConfig": [
        *("dtype", "batch_size", "epochs", "loss", "peft_config", "dataset_preprocess_config"),
        *("num_nodes", "resources_per_node"),
    ],
    "LoraConfig": [
        *("apply_lora_to_mlp", "apply_lora_to_output", "lora_attn_modules", "lora_rank", "lora_alpha"),
        *("lora_dropout", "quantize_base", "use_dora"),
    ],
    "TorchTuneInstructDataset": ["source", "split", "train_on_input", "new_system_prompt", "column_map"],
    "TorchTuneChatDataset": [
        *("source", "split", "conversation_column", "conversation_style", "train_on_input", "new_system_prompt"),
    ],
    "TorchTuneMultimodalDataset": ["source", "split", "column_map", "image_dir", "image_tag"],
    "Runtime": ["name", "trainer", "pretrained_model"],
}
"""KEP-2401's fields."""


def names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]


@pytest.mark.parametrize("name", CLASSES)
def test_fields_of_kubeflow_come_first_and_in_its_order(name):
    own = names(getattr(ours, name))
    found = names(getattr(theirs, name, None) or getattr(their_types, name))
    assert own[: len(found)] == found


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_fields_of_kubeflow(name):
    assert names(getattr(ours, name)) == names(getattr(their_options, name))


@pytest.mark.parametrize("name", KEP)
def test_fields_of_the_kep(name):
    assert set(KEP[name]) <= set(names(getattr(ours, name)))


@pytest.mark.parametrize("name", ["DataFormat", "DataType", "Loss", "TrainerType", "RuntimeKind"])
def test_enums_have_the_members_of_kubeflow(name):
    own: type[enum.Enum] = getattr(ours, name)
    found: type[enum.Enum] = getattr(theirs, name)
    assert {member.name: member.value for member in own} == {member.name: member.value for member in found}


@pytest.mark.parametrize("name", ["LoraConfig", "HuggingFaceModelInitializer", "S3ModelInitializer"])
def test_defaults_are_those_of_kubeflow(name):
    given = {"storage_uri": "s3://bucket/model"} if "Initializer" in name else {}
    own, found = getattr(ours, name)(**given), getattr(theirs, name)(**given)
    assert {field: getattr(own, field) for field in names(type(found))} == dataclasses.asdict(found)


def test_places_in_a_pod():
    assert (ours.DATASET_PATH, ours.MODEL_PATH) == (theirs.DATASET_PATH, theirs.MODEL_PATH)


def test_names_of_the_kep_for_a_runtimes_trainer():
    own = ours.RuntimeTrainer(ours.TrainerType.BUILTIN_TRAINER, ours.Framework.TORCH, device="gpu", device_count=4)
    own.set_command(("torchrun", "train.py"))
    assert (own.entrypoint, own.accelerator, own.accelerator_count) == (["torchrun", "train.py"], "gpu", 4)
    keps = ours.Trainer(
        "BuiltinTrainer", "torch", entrypoint=("torchrun", "train.py"), accelerator="gpu", accelerator_count=4
    )
    assert keps == own
    assert ours.Runtime("r", own).trainer_type == "BuiltinTrainer"
    assert ours.Runtime("r").trainer_type is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ours.TorchTuneConfig(learning_rte=1),
            "TorchTuneConfig.learning_rte: is not a known field; did you mean",
        ),
        (lambda: ours.LoraConfig(rank=8), "LoraConfig.rank: is not a known field; did you mean lora_rank?"),
        (lambda: ours.Initializer(data=None), "Initializer.data: is not a known field; did you mean dataset?"),
        (lambda: ours.BuiltinTrainer(xyz=1), "BuiltinTrainer.xyz: is not a known field; there are config, engine, env"),
    ],
)
def test_unknown_fields_are_named(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_secrets_are_not_shown():
    shown = repr(
        [
            ours.HuggingFaceModelInitializer("hf://a/b", access_token="hush"),
            ours.S3DatasetInitializer("s3://b/c", access_key_id="hush", secret_access_key="hush"),
            ours.ModelExporter("hf://a/b", access_token="hush", secret_access_key="hush", access_key_id="hush"),
        ]
    )
    assert "hush" not in shown


def test_a_template_is_what_train_takes(client):
    template = ours.TrainJobTemplate(ours.BuiltinTrainer(), "luthier-smollm2-135m")
    assert client.train(**template, dry_run=True).runtime == "luthier-smollm2-135m"


def test_every_name_has_a_home():
    assert dir(ours) == sorted(ours.__all__)
    for name in ours.__all__:
        assert getattr(ours, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        ours.Trainr  # noqa: B018

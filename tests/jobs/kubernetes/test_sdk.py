"""The unmodified Kubeflow SDK with our manifests: it lists our runtimes and trains on them; we see its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes
import pytest
from kubeflow.common.types import KubernetesBackendConfig as KubeflowConfig
from kubeflow.trainer import (
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    DataFormat,
    DataType,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainerClient,
    TrainerType,
)
from kubeflow.trainer.options import Labels, Name, TrainerArgs, TrainerCommand

from luthier.config.load import check_config
from luthier.jobs.backends.kubernetes import KubernetesBackend
from luthier.jobs.node import read_job
from luthier.jobs.pod import overridden
from luthier.jobs.runtimes import builtin
from luthier.jobs.tune import parsed, spec_of
from tests.jobs.kubernetes.api import NAMESPACE
from tests.jobs.kubernetes.cluster import Cluster, cluster
from tests.jobs.kubernetes.jobset import expanded
from tests.jobs.kubernetes.test_manifests import OURS, REPLACEMENTS

PRESET = "luthier-qwen2.5-0.5b"


@pytest.fixture(scope="module")
def made() -> Iterator[Cluster]:
    with cluster() as started:
        for runtime in [*OURS.values(), *REPLACEMENTS.values()]:
            started.add_runtime(runtime)
        yield started


@pytest.fixture
def sdk(world: Cluster) -> TrainerClient:
    settings = kubernetes.client.Configuration(host=world.url)
    return TrainerClient(KubeflowConfig(namespace=NAMESPACE, client_configuration=settings))


def words(world: Cluster, job: str) -> list[str]:
    """What the first node of a job runs."""
    container = world.pod(job, "node-0")["spec"]["containers"][0]
    environment = world.environment(job, "node-0")
    return [expanded(word, environment) for word in [*container["command"], *(container.get("args") or [])]]


def fetched(world: Cluster, job: str) -> None:
    world.begins(job, "dataset-initializer", "model-initializer")
    world.ends(job, "dataset-initializer", "model-initializer")


def test_it_lists_our_runtimes(sdk: TrainerClient) -> None:
    found = {runtime.name: runtime.trainer for runtime in sdk.list_runtimes()}
    assert set(found) == {*OURS, *REPLACEMENTS}
    for ours in builtin("gpu"):
        if ours.name != "torch-distributed":
            theirs = found[ours.name]
            assert ours.trainer is not None
            assert theirs.trainer_type == TrainerType.CUSTOM_TRAINER
            nodes, gpus = ours.trainer.num_nodes, int(ours.trainer.device_count)
            assert (theirs.num_nodes, theirs.device, theirs.device_count) == (nodes, "gpu", str(nodes * gpus))
    assert found["torchtune-llama3.2-1b"].trainer_type == TrainerType.BUILTIN_TRAINER
    assert sdk.get_runtime(PRESET).trainer.framework == "luthier"


def test_a_runtime_alone_trains(sdk: TrainerClient, world: Cluster, backend: KubernetesBackend) -> None:
    name = sdk.train(runtime=PRESET)
    assert sdk.get_job(name).status == "Created"
    fetched(world, name)
    world.begins(name, "node-0")
    job = sdk.get_job(name)
    assert {step.name for step in job.steps} == {"dataset-initializer", "model-initializer", "node-0"}
    assert (job.status, job.num_nodes) == ("Running", 1)
    assert words(world, name) == ["python", "-m", "luthier.jobs.pod"]
    assert check_config(read_job(world.environment(name, "node-0"))["config"])[1] == []
    world.says(name, "node-0", "step 1", "step 2")
    assert list(sdk.get_job_logs(name)) == ["step 1", "step 2"]
    assert backend.get_job(name).status == "Running"
    world.ends(name, "node-0")
    world.ends(name, "exporter")
    assert sdk.wait_for_job_status(name, timeout=4, polling_interval=1).status == "Complete"
    assert [step.name for step in backend.get_job(name).steps] == ["dataset-initializer", "model-initializer", "node-0"]
    assert list(sdk.get_job_logs(name, follow=True)) == ["step 1", "step 2"]
    assert name in [it.name for it in sdk.list_jobs()]
    sdk.delete_job(name)
    assert name not in [it.name for it in backend.list_jobs()]


def test_its_initializers_are_ours(sdk: TrainerClient, world: Cluster) -> None:
    initializer = Initializer(
        dataset=HuggingFaceDatasetInitializer(storage_uri="hf://a/b", access_token="hf_their_way"),
        model=HuggingFaceModelInitializer(storage_uri="hf://c/d", ignore_patterns=["*.bin", "*.pt"]),
    )
    name = sdk.train(runtime=PRESET, initializer=initializer)
    dataset = {"STORAGE_URI": "hf://a/b", "ACCESS_TOKEN": "hf_their_way"}
    assert world.environment(name, "dataset-initializer") == dataset
    assert world.environment(name, "model-initializer") == {"STORAGE_URI": "hf://c/d", "IGNORE_PATTERNS": "*.bin,*.pt"}


def test_arguments_are_overrides_of_the_run(sdk: TrainerClient, world: Cluster) -> None:
    args = ["optimizer.learning_rate=1e-3", "train.epochs=3"]
    name = sdk.train(runtime=PRESET, options=[TrainerArgs(args), Labels({"team": "nlp"}), Name("argued")])
    assert name == "argued"
    fetched(world, name)
    python, flag, module, *rest = words(world, name)
    assert (python, flag, module, rest) == ("python", "-m", "luthier.jobs.pod", args)
    config = overridden(read_job(world.environment(name, "node-0"))["config"], rest)
    assert (config["optimizer"]["learning_rate"], config["train"]["epochs"]) == (1e-3, 3)
    assert world.train_job(name)["metadata"]["labels"] == {"team": "nlp"}


def test_a_command_takes_the_place_of_ours(sdk: TrainerClient, world: Cluster) -> None:
    name = sdk.train(runtime=PRESET, options=[TrainerCommand(["luthier", "doctor"])])
    fetched(world, name)
    assert words(world, name) == ["luthier", "doctor"]


@pytest.mark.parametrize("runtime", [PRESET, "torch-distributed"])
def test_a_function_runs_beside_what_was_fetched(sdk: TrainerClient, world: Cluster, runtime: str) -> None:
    def train(steps: int) -> None:
        print("trained", steps)

    trainer = CustomTrainer(
        func=train, func_args={"steps": 3}, num_nodes=2, env={"A": "1"}, resources_per_node={"gpu": 4}
    )
    name = sdk.train(runtime=runtime, trainer=trainer)
    fetched(world, name)
    shell, flag, script = words(world, name)
    assert (shell, flag) == ("bash", "-c")
    assert "train(**{'steps': 3})" in script
    assert "torchrun" in script
    environment = world.environment(name, "node-1")
    assert {key: environment[key] for key in ("A", "PET_NNODES", "PET_NODE_RANK")} == {
        "A": "1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
    }
    assert sdk.get_job(name).num_nodes == 2


def test_a_container_of_ones_own(sdk: TrainerClient, world: Cluster) -> None:
    trainer = CustomTrainerContainer(image="mine:1", num_nodes=1)
    name = sdk.train(
        runtime="torch-distributed", trainer=trainer, options=[TrainerCommand(["run"]), TrainerArgs(["-x"])]
    )
    fetched(world, name)
    assert world.pod(name, "node-0")["spec"]["containers"][0]["image"] == "mine:1"
    assert words(world, name) == ["run", "-x"]


@pytest.mark.parametrize(
    ("runtime", "lora", "recipe"),
    [
        ("torchtune-llama3.2-1b", None, "full_finetune_single_device"),
        ("torchtune-llama3.2-3b", LoraConfig(lora_rank=4, lora_alpha=8), "lora_finetune_single_device"),
        (
            "torchtune-qwen2.5-1.5b",
            LoraConfig(lora_attn_modules=[], apply_lora_to_mlp=True),
            "lora_finetune_single_device",
        ),
    ],
)
def test_a_builtin_trainer_where_kubeflow_admits_it(
    sdk: TrainerClient, world: Cluster, runtime: str, lora: LoraConfig | None, recipe: str
) -> None:
    """The plugin turns `tune run` into a recipe of torchtune's; our image's `tune` turns that into the same run."""
    config = TorchTuneConfig(
        dtype=DataType.BF16,
        batch_size=8,
        epochs=2,
        peft_config=lora,
        resources_per_node={"gpu": 1},
        dataset_preprocess_config=TorchTuneInstructDataset(
            source=DataFormat.JSON, column_map={"input": "question", "output": "answer"}
        ),
    )
    initializer = Initializer(dataset=HuggingFaceDatasetInitializer(storage_uri="hf://a/b/v1.0"))
    name = sdk.train(runtime=runtime, trainer=BuiltinTrainer(config=config), initializer=initializer)
    fetched(world, name)
    tune, *rest = words(world, name)
    assert (tune, rest[0]) == ("tune", "run")
    spec = spec_of(parsed(rest), {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"})
    assert spec.config is not None
    assert check_config(spec.config)[1] == []
    assert spec.recipe == recipe
    (source,) = spec.config["data"]["train"]
    assert (source["path"], source["kind"]) == ("dataset/v1.0", "json")
    assert (spec.config["train"]["rows_per_step"], spec.config["train"]["epochs"]) == (8, 2)


def test_kubeflows_refusals_are_kubeflows(sdk: TrainerClient) -> None:
    with pytest.raises(ValueError, match="BuiltinTrainer can't be used"):
        sdk.train(runtime=PRESET, trainer=BuiltinTrainer(config=TorchTuneConfig()))
    with pytest.raises(RuntimeError, match="Failed to create"):
        sdk.train(runtime="torchtune-llama3.2-1b", trainer=BuiltinTrainer(config=TorchTuneConfig(num_nodes=2)))


def test_conflicts_and_failures(sdk: TrainerClient, world: Cluster, backend: KubernetesBackend) -> None:
    name = sdk.train(runtime=PRESET, options=[Name("conflict")])
    with pytest.raises(RuntimeError, match="Failed to create"):
        sdk.train(runtime=PRESET, options=[Name("conflict")])
    fetched(world, name)
    world.begins(name, "node-0")
    world.says(name, "node-0", "out of memory")
    world.ends(name, "node-0", code=137)
    with pytest.raises(RuntimeError, match="is Failed"):
        sdk.wait_for_job_status(name, timeout=4, polling_interval=1)
    assert sdk.wait_for_job_status(name, {"Failed"}, timeout=4, polling_interval=1).status == "Failed"
    assert backend.get_job(name).message == "node-0 left with exit code 137:\nout of memory"
    with pytest.raises(RuntimeError, match="Failed to get"):
        sdk.get_job("nobody")
    with pytest.raises(RuntimeError, match="Failed to get Runtime"):
        sdk.train(runtime="luthier-nothing")


def test_it_sees_our_jobs(sdk: TrainerClient, world: Cluster, backend: KubernetesBackend) -> None:
    from luthier.jobs.spec import JobSpec

    backend.submit(JobSpec("ours", PRESET, "luthier", engine="luthier", config={"model": "model"}, num_nodes=2))
    fetched(world, "ours")
    world.begins("ours", "node-0", "node-1")
    job: Any = sdk.get_job("ours")
    assert (job.status, job.num_nodes, job.runtime.name) == ("Running", 2, PRESET)
    sdk.delete_job("ours")
    assert "ours" not in [it.name for it in backend.list_jobs()]

"""What a client makes of what it is asked for, and how it waits."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from luthier.errors import ConfigError, UserError
from luthier.jobs import (
    ActiveDeadlineSeconds,
    Annotations,
    BuiltinTrainer,
    CustomDataset,
    CustomTrainer,
    CustomTrainerContainer,
    DatasetInitializer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    InheritEnvironment,
    Initializer,
    JobFailedError,
    JobTimeoutError,
    Labels,
    LocalBackendConfig,
    LoraConfig,
    LuthierConfig,
    ModelExporter,
    ModelInitializer,
    Name,
    Runtime,
    RuntimePatch,
    S3DatasetInitializer,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainerArgs,
    TrainerClient,
    TrainerCommand,
    register_dataset,
)
from luthier.jobs.asked import Asked
from luthier.jobs.build import build
from luthier.jobs.runtimes import builtin
from luthier.jobs.spec import JobSpec
from luthier.jobs.validate import check_packages
from luthier.jobs.wire import described, packed, unpacked

RUNTIME = "luthier-qwen2.5-0.5b"


def seven() -> None:
    print(7)


def failing(words: str) -> None:
    raise SystemExit(words)


def dry(client: TrainerClient, *options: object, **asked: object):
    return client.train(asked.pop("runtime", RUNTIME), options=list(options), **asked, dry_run=True)


# --- train ------------------------------------------------------------------------------------------------------------


def test_a_runtime_alone_is_enough(client):
    spec = dry(client)
    assert spec.steps() == ["dataset-initializer", "model-initializer", "node-0"]
    assert spec.dataset.env == {"STORAGE_URI": "hf://tatsu-lab/alpaca"}
    assert spec.model.env["STORAGE_URI"] == "hf://Qwen/Qwen2.5-0.5B-Instruct"
    assert (spec.config["model"], spec.config["output"]) == ("model", "output")
    assert spec.config["data"]["train"] == [{"path": "dataset", "format": "instruct"}]
    assert spec.config["train"]["epochs"] == 1


def test_names_are_random_or_given(client):
    first, second = dry(client).name, dry(client).name
    assert first != second
    assert first[0].isalpha()
    assert len(first) == 12
    assert dry(client, Name("mine-1")).name == "mine-1"


@pytest.mark.parametrize(
    "runtime", ["torchtune-qwen2.5-0.5b", "qwen2.5-0.5b", "Luthier-Qwen2.5-0.5B", Runtime(RUNTIME)]
)
def test_other_names_of_a_runtime(client, runtime):
    assert dry(client, runtime=runtime).runtime == RUNTIME


def test_ones_own_model_and_rows_leave_nothing_to_fetch(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    config = LuthierConfig(model="debug:llama", data="rows.jsonl", train={"steps": 2})
    for runtime in (None, RUNTIME):
        spec = client.train(runtime, trainer=BuiltinTrainer(config), dry_run=True)
        assert spec.steps() == ["node-0"]
        assert spec.config["model"] == "debug:llama"
        assert spec.config["data"]["train"] == [{"path": str(tmp_path / "rows.jsonl")}]
        assert spec.config["train"]["steps"] == 2
        assert "epochs" not in spec.config["train"]


def test_what_a_config_leaves_out_comes_from_the_runtime(client):
    config = LuthierConfig(adapter={"rank": 4}, schedule={"name": "cosine"}, train={"tokens_per_step": 512})
    spec = dry(client, trainer=BuiltinTrainer(config))
    assert spec.config["optimizer"]["learning_rate"] == 3e-4  # that of adapters
    assert spec.config["train"] == {"tokens_per_step": 512, "epochs": 1}
    assert spec.config["adapter"] == {"kind": "lora", "rank": 4}
    assert spec.recipe == "lora_finetune_single_device"
    bare = dry(client, trainer=BuiltinTrainer(LuthierConfig(adapter={})), exporter=ModelExporter("hf://a/b", "adapter"))
    assert (bare.config["adapter"], bare.config["optimizer"]["learning_rate"]) == ({"kind": "lora"}, 3e-4)
    assert bare.recipe == "lora_finetune_single_device"
    full = dry(client, trainer=BuiltinTrainer(LuthierConfig(adapter=None)))
    assert full.config["optimizer"]["learning_rate"] == 2e-5
    assert full.recipe == "full_finetune_single_device"


def test_layouts_come_from_the_catalogue(client):
    config = TorchTuneConfig(num_nodes=4, resources_per_node={"gpu": 8})
    spec = dry(client, runtime="luthier-llama3.1-70b", trainer=BuiltinTrainer(config))
    assert spec.config["parallel"] == {"dp_shard": 32}
    assert spec.config["train"]["activation_checkpointing"] == "full"
    own = TorchTuneConfig(num_nodes=4, resources_per_node={"gpu": 8}, tensor_parallel_dim=8)
    assert dry(client, runtime="luthier-llama3.1-70b", trainer=BuiltinTrainer(own)).config["parallel"] == {"tp": 8}


def test_another_data_set_is_not_taken_for_alpaca(client):
    own = Initializer(dataset=HuggingFaceDatasetInitializer("me/rows"))
    assert dry(client, initializer=own).config["data"]["train"] == [{"path": "dataset"}]
    again = Initializer(dataset=HuggingFaceDatasetInitializer("tatsu-lab/alpaca/data"))
    source = {"path": "dataset/data", "format": "instruct"}
    assert dry(client, initializer=again).config["data"]["train"] == [source]


def test_files_that_an_initializer_fetches_can_be_named(client):
    config = LuthierConfig(data={"train": "dataset/a.jsonl", "validation": "dataset/b.jsonl"})
    own = Initializer(dataset=HuggingFaceDatasetInitializer("me/rows"))
    spec = dry(client, initializer=own, trainer=BuiltinTrainer(config))
    assert spec.dataset.env == {"STORAGE_URI": "hf://me/rows"}
    assert spec.config["data"]["validation"] == [{"path": "dataset/b.jsonl"}]


def test_options(client):
    spec = dry(
        client, Labels({"team": "a"}), Annotations({"note": "b c"}), ActiveDeadlineSeconds(60), InheritEnvironment()
    )
    assert (spec.labels, spec.annotations, spec.active_deadline_seconds) == ({"team": "a"}, {"note": "b c"}, 60)
    assert spec.inherit_environment


def test_a_function_travels_as_source(client):
    spec = client.train(trainer=CustomTrainer(seven), dry_run=True)
    assert (spec.runtime, spec.steps()) == ("torch-distributed", ["node-0"])
    scope: dict[str, object] = {}
    exec(spec.function.source, scope)
    assert callable(scope[spec.function.name])


def test_a_function_that_needs_its_surroundings_is_refused(client):
    around = 3

    def inner() -> None:
        print(around)

    with pytest.raises(ConfigError, match=r"trainer.func: uses around of the function around it"):
        client.train(trainer=CustomTrainer(inner), dry_run=True)


def test_a_class_of_ones_own_travels_as_source(client):
    @register_dataset("verses")
    class Riddles:
        def __init__(self, tokenizer, source):
            self.options = source.options

        def __call__(self, row):
            return row

    config = TorchTuneConfig(dataset_preprocess_config=CustomDataset("verses", options={"n": 1}))
    spec = dry(client, trainer=BuiltinTrainer(config))
    assert spec.config["data"]["train"][0]["format"] == "own_dataset:Riddles"
    scope: dict[str, object] = {}
    exec(spec.files["own_dataset.py"], scope)
    assert isinstance(scope["Riddles"], type)


def test_a_class_that_cannot_read_a_row_is_refused(client):
    @register_dataset("silent")
    class Silent:
        def __init__(self, tokenizer, source):
            pass

    config = TorchTuneConfig(dataset_preprocess_config=CustomDataset("silent"))
    with pytest.raises(ConfigError, match=r"Silent cannot be called with a row; give it __call__\(self, row\)"):
        client.train(trainer=BuiltinTrainer(config), runtime="luthier-qwen2.5-0.5b", dry_run=True)


def test_specs_hold_nothing_but_plain_data(client):
    spec = dry(client, trainer=BuiltinTrainer(TorchTuneConfig(dtype="bf16", peft_config=LoraConfig())))
    assert unpacked(packed(spec)) == spec
    words = JobSpec("job", "torch-distributed", "torch", command=("a", "b"), args=("c",))
    assert unpacked(packed(words)) == words


def test_command_and_arguments_of_an_image():
    """Arguments alone are those of the image's own entry point."""
    container = CustomTrainerContainer("mine:1")
    for options, command, args in (
        ([TrainerArgs(["-x"])], None, ("-x",)),
        ([TrainerCommand(["run", "it"])], ("run", "it"), ()),
        ([TrainerCommand(["run"]), TrainerArgs(["-x"])], ("run",), ("-x",)),
        ([], None, ()),
    ):
        spec = build(Asked("kubernetes", builtin(), "torch-distributed", None, container, options))
        assert (spec.command, spec.args) == (command, args)


def test_what_may_be_secret_is_not_shown(client):
    trainer = CustomTrainer(seven, pip_index_urls=["https://me:hush@index"], env={"KEY": "hush"})
    spec = client.train(trainer=trainer, dry_run=True)
    assert (spec.env, spec.function.pip_index_urls) == ({"KEY": "hush"}, ("https://me:hush@index",))
    assert "hush" not in repr(trainer) + repr(spec) + str(described(spec)) + repr(BuiltinTrainer(env={"KEY": "hush"}))


# --- refusals ---------------------------------------------------------------------------------------------------------

PATCH = RuntimePatch()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"runtime": "luthier-lama3.2-1b"},
            'runtime: there is no runtime "luthier-lama3.2-1b"; did you mean luthier-llama',
        ),
        ({"runtime": "torchtune-lama3.2-1b"}, "did you mean luthier-llama3.2-1b?"),
        ({"runtime": 7}, "runtime: int is neither a name nor a Runtime"),
        ({"runtime": None}, "runtime: is missing; name one, or give a trainer"),
        (
            {"runtime": "luthier-llama3.2-vision-11b"},
            "runtime: meta-llama/Llama-3.2-11B-Vision-Instruct reads pictures",
        ),
        ({"runtime": "torch-distributed"}, "trainer: is missing: runtime torch-distributed has nothing of its own"),
        (
            {"runtime": "torch-distributed", "trainer": BuiltinTrainer()},
            "runtime: runtime torch-distributed runs torch",
        ),
        ({"trainer": CustomTrainer(seven)}, f"trainer: runtime {RUNTIME} trains a model itself"),
        ({"trainer": TorchTuneConfig()}, "trainer: TorchTuneConfig is not BuiltinTrainer, CustomTrainer or"),
        ({"initializer": DatasetInitializer("hf://a/b")}, "initializer: DatasetInitializer is not Initializer"),
        ({"options": [Name("Bad_Name")]}, 'options.0.name: "Bad_Name" is not a name of lower-case'),
        ({"options": [Name("a" * 64)]}, "options.0.name: has 64 characters, and may have 63"),
        ({"options": [Name(7)]}, "options.0.name: 7 is not text"),
        ({"options": Name("mine")}, "options: Name is not a list of options"),
        ({"options": ["mine"]}, "options.0: str is not an option"),
        ({"options": [Labels({"a/b/c!": "x"})]}, 'options.0.labels: "a/b/c!" is not a key of a label'),
        ({"options": [Labels({"a": "x y"})]}, 'options.0.labels.a: "x y" is not a value of a label'),
        ({"options": [Labels({"a..b/c": "x"})]}, 'options.0.labels: "a..b/c" is not a key of a label'),
        ({"options": [Labels({"a.-b/c": "x"})]}, 'options.0.labels: "a.-b/c" is not a key of a label'),
        (
            {"options": [Annotations({"jobs.luthier/secrets": "anothers"})]},
            "options.0.annotations.jobs.luthier/secrets: is set by Luthier itself; choose another prefix",
        ),
        ({"options": [Labels({"jobs.luthier/x": "y"})]}, "options.0.labels.jobs.luthier/x: is set by Luthier itself"),
        ({"options": [Annotations({"a": "\ud83d"})]}, "options.0.annotations.a: holds half a character"),
        ({"trainer": BuiltinTrainer(env={"A": "\ud83d"})}, "trainer.env.A: holds half a character"),
        ({"options": [Labels({"-a/b": "x"})]}, 'options.0.labels: "-a/b" is not a key of a label'),
        (
            {"options": [Annotations({"no key": "x y"})]},
            'options.0.annotations: "no key" is not a key of an annotation',
        ),
        ({"options": [Name("a"), Labels({}), Name("b")]}, "options.2: Name has been given before; make them one"),
        ({"trainer": BuiltinTrainer(env={"LUTHIER_JOB": "x"})}, "trainer.env.LUTHIER_JOB: is set by whoever starts"),
        (
            {"trainer": BuiltinTrainer(TorchTuneConfig(resources_per_node={"gpu": 1, "nvidia.com/gpu": 2}))},
            "trainer.config.resources_per_node.nvidia.com/gpu: names GPUs a second time",
        ),
        (
            {"trainer": BuiltinTrainer(TorchTuneConfig(resources_per_node={"memory": "64K"}))},
            'trainer.config.resources_per_node.memory: "64K" is not a quantity',
        ),
        *(
            (
                {"trainer": BuiltinTrainer(TorchTuneConfig(resources_per_node=asked))},
                f"trainer.config.resources_per_node.{words}",
            )
            for asked, words in (
                ({"ram": "4Gi"}, "ram: is not a resource; there are cpu, memory, gpu, and devices as nvidia.com/gpu"),
                ({"cpu ": 4}, "cpu : is not a resource"),
                ({"": 4}, ": is not a resource"),
                ({"cpu": 4, "CPU": 8}, "cpu: is there a second time; leave one out"),
                ({"memory": "500m"}, 'memory: "500m" is a part of a byte; "500Mi" is so many MiB'),
                ({"cpu": "-1"}, 'cpu: "-1" is not a quantity'),
                ({"cpu": "1e9999"}, 'cpu: "1e9999" is not a quantity'),
            )
        ),
        ({"options": [ActiveDeadlineSeconds(0)]}, "options.0.seconds: must be at least 1, not 0"),
        ({"options": [PATCH]}, "options.0: this machine has no pods to patch"),
        ({"options": [TrainerCommand(["x"])]}, "options: TrainerCommand is for a CustomTrainerContainer"),
        ({"options": [TrainerArgs(["x"])]}, "options: TrainerArgs is for a CustomTrainerContainer"),
        (
            {"exporter": ModelExporter("https://h/m")},
            "exporter.storage_uri: https:// is not hf://, s3://, gs:// or file://",
        ),
        ({"exporter": ModelExporter("hf://a/b/c")}, "exporter.storage_uri: names a path in a repository"),
        (
            {"exporter": ModelExporter("hf://datasets/a/b")},
            "exporter.storage_uri: names a data set of the Hub",
        ),
        *(
            (
                {"runtime": "torch-distributed", "trainer": CustomTrainer(seven, packages_to_install=["six", package])},
                f"trainer.packages_to_install.1: {package!r} is no requirement; write one each",
            )
            for package in ("--index-url=x", "-r file", "six\n-r file", "six\f-r file", "six\u2028-r file", "six\\")
        ),
        (
            {
                "runtime": "torch-distributed",
                "trainer": CustomTrainer(seven, packages_to_install=["git+https://me:hidden@host/repo"]),
            },
            "trainer.packages_to_install.0: has credentials in its address; let pip find it by an index",
        ),
        (
            {
                "runtime": "torch-distributed",
                "trainer": CustomTrainer(seven, packages_to_install=["six @ https://host/six.whl?signature=hidden"]),
            },
            "trainer.packages_to_install.0: has a query in its address, which may be a signature; let pip find it",
        ),
        ({"exporter": ModelExporter("/tmp/out")}, 'exporter.storage_uri: "/tmp/out" has no scheme; write hf://'),
        ({"exporter": ModelExporter("hf://a/b", form="adapter")}, "exporter.form: there is no adapter"),
        (
            {"exporter": ModelExporter("hf://a/b"), "trainer": CustomTrainer(seven), "runtime": "torch-distributed"},
            "exporter: is for a BuiltinTrainer's model; let the function save",
        ),
        ({"exporter": ModelExporter("hf://a/b", form="lora")}, 'exporter.form: "lora" is not merged or adapter'),
    ],
)
def test_refusals(client, asked, words):
    with pytest.raises(ConfigError) as caught:
        client.train(**{"runtime": RUNTIME} | asked, dry_run=True)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("hf://a/b/../../c", "would lead out of the directory"),
        ("hf://../..", "names no repository"),
        ("hf://alpaca", '"hf://alpaca" names no owner; write hf://owner/name'),
        ("s4://bucket/x", "s4:// is not hf://, s3://, gs://, https:// or file://"),
        ("cache://schema/table", "cache:// is not hf://"),
        ("s3:///x", "names no bucket"),
        ("https:///x", "names no host"),
        ("file://rows", "'file://rows' has no absolute path"),
        ("https://host", "https://host names no file"),
        ("https://host/x#frag", "https://host/x has a fragment that says nothing"),
        ("https://me:hush@host/x", "https://host/x came with credentials in it"),
        ("s3://me:hush@bucket/x", "s3://bucket/x came with credentials in it"),
        ("hf://a/b\x07/c", "has control characters in it"),
        ("file:///no/such/place", "there is no /no/such/place"),
        ("rows.jsonl", '"rows.jsonl" has no scheme'),
        ("", '"" has no scheme'),
    ],
)
def test_places_that_there_are_not(client, uri, words):
    for name, kind in (("dataset", DatasetInitializer), ("model", ModelInitializer)):
        with pytest.raises(ConfigError) as caught:
            dry(client, initializer=Initializer(**{name: kind(uri)}))
        assert str(caught.value).startswith(f"initializer.{name}.storage_uri: ")
        assert words in str(caught.value)
        assert "hush" not in str(caught.value)


def test_a_place_is_looked_at_as_the_step_reads_it(client, tmp_path):
    place = tmp_path / "my rows"
    place.mkdir()
    (place / "rows.jsonl").write_text('{"body": "a"}\n')
    for uri in (place.as_uri(), f"file://localhost{place}"):
        with pytest.raises(ConfigError, match=r"the columns of the rows \(body\) fit no format"):
            dry(client, initializer=Initializer(dataset=DatasetInitializer(uri)))


@pytest.mark.parametrize("backend", ["local", "slurm", "kubernetes"])
def test_the_query_of_an_address_is_a_secret(backend):
    """It may be a signature; a TrainJob has no place where nobody else reads it."""
    signed = Initializer(dataset=DatasetInitializer("https://host/rows.jsonl?signature=hush#sha256=" + 64 * "a"))
    asked = Asked(backend, builtin("cpu", 1), RUNTIME, signed)
    if backend == "kubernetes":
        with pytest.raises(ConfigError, match=r"https://host/rows.jsonl came with a query, which whoever") as caught:
            build(asked)
        assert "hush" not in str(caught.value)
        return
    spec = build(asked)
    assert "hush" not in repr(spec) + str(described(spec))
    assert {**spec.dataset.env, **spec.dataset.secrets}["STORAGE_URI"] == signed.dataset.storage_uri
    checked = Initializer(dataset=DatasetInitializer("https://host/rows.jsonl#sha256=" + 64 * "a"))
    assert build(Asked(backend, builtin("cpu", 1), RUNTIME, checked)).dataset.env["STORAGE_URI"].endswith("a")


def test_one_half_of_a_key_opens_nothing(client):
    half = S3DatasetInitializer("s3://b/x", access_key_id="a", secret_access_key="")
    with pytest.raises(ConfigError, match=r"^initializer.dataset.secret_access_key: is missing; it goes with access_k"):
        dry(client, initializer=Initializer(dataset=half))
    with pytest.raises(ConfigError, match=r"^exporter.access_key_id: is missing; it goes with secret_access_key"):
        dry(client, exporter=ModelExporter("s3://b/x", secret_access_key="a"))


def test_the_hubs_initializers_take_the_hub_alone(client):
    for name, kind in (("dataset", HuggingFaceDatasetInitializer), ("model", HuggingFaceModelInitializer)):
        with pytest.raises(ConfigError, match=r"s3:// is not hf://"):
            dry(client, initializer=Initializer(**{name: kind("s3://b/x")}))


def test_a_runtime_without_a_model_needs_one(client):
    with pytest.raises(ConfigError) as caught:
        client.train(trainer=BuiltinTrainer(), dry_run=True)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "initializer.model",
        "initializer.dataset",
    ]


def test_the_run_directory_is_the_jobs(client):
    with pytest.raises(ConfigError, match=r"trainer.config.output: is the workspace's output/ for every job"):
        dry(client, trainer=BuiltinTrainer(LuthierConfig(output="runs/mine")))


# --- jobs -------------------------------------------------------------------------------------------------------------


def test_a_function_runs_and_is_waited_for(client):
    seen = []
    name = client.train(trainer=CustomTrainer(seven), options=[Name("seven")])
    job = client.wait_for_job_status(name, timeout=120, polling_interval=0.1, callbacks=[seen.append])
    assert (name, job.status) == ("seven", "Complete")
    assert seen[-1] == job
    assert "7" in list(client.get_job_logs(name))
    assert [job.name for job in client.list_jobs("torch-distributed")] == ["seven"]
    assert client.list_jobs(client.get_runtime(RUNTIME)) == client.list_jobs("no-such-runtime") == []
    assert all(event.event_time <= datetime.now(UTC) for event in client.get_job_events(name))
    with pytest.raises(UserError, match=r"seven: has ended as Complete, and will not be Running"):
        client.wait_for_job_status(name, {"Running"})
    client.delete_job(name)
    assert client.list_jobs() == []


def test_a_failure_is_raised_with_the_last_lines(client):
    name = client.train(trainer=CustomTrainer(failing, {"words": "out of wood"}))
    with pytest.raises(JobFailedError, match=r"(?s)has failed.*node-0.*out of wood") as caught:
        client.wait_for_job_status(name, timeout=120, polling_interval=0.1)
    assert isinstance(caught.value, RuntimeError)  # what Kubeflow's client raises
    assert client.wait_for_job_status(name, {"Complete", "Failed"}).status == "Failed"
    client.delete_job(name)


def test_the_last_lines_are_those_of_the_node_that_failed_first(client, tmp_path):
    """The other node is ended because of it, and has nothing to do with the reason."""
    os.mkfifo(tmp_path / "gate")
    script = f"test $PET_NODE_RANK = 1 && echo out of wood && read line < {tmp_path}/gate && exit 3; "
    script += f"echo well; echo go > {tmp_path}/gate; while :; do sleep 0.1; done"
    client.backend.submit(JobSpec("two", RUNTIME, "torch", 2, 1, command=("sh", "-c", script)))
    with pytest.raises(JobFailedError) as caught:
        client.wait_for_job_status("two", timeout=120, polling_interval=0.1)
    assert str(caught.value).splitlines() == ["two: has failed: node-1 left with exit code 3:", "out of wood"]
    assert [step.status for step in client.get_job("two").steps] == ["Failed", "Failed"]
    keps = RUNTIME.replace("luthier", "torchtune")
    assert [job.name for job in client.list_jobs(keps)] == ["two"]  # the KEP's name of the runtime means the same
    client.delete_job("two")


def test_waiting_ends(client, tmp_path):
    def waiting(path: str) -> None:
        with open(path) as gate:
            gate.read()

    os.mkfifo(tmp_path / "gate")
    name = client.train(trainer=CustomTrainer(waiting, {"path": str(tmp_path / "gate")}))
    with pytest.raises(JobTimeoutError, match=r"is (Created|Running) after 0.2 seconds, not Complete") as caught:
        client.wait_for_job_status(name, timeout=0.2, polling_interval=0.1)
    assert isinstance(caught.value, TimeoutError)
    client.delete_job(name)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"status": {"Done"}}, "status: Done is not a status"),
        ({"status": set()}, "status: nothing is not a status"),
        ({"status": None}, "status: None is not a status"),
        ({"status": [1, ["Complete"]]}, "status: 1, ['Complete'] is not a status"),
        ({"polling_interval": 0}, "polling_interval: must be more than 0"),
        ({"timeout": 0}, "timeout: must be more than 0, not 0"),
        ({"timeout": float("nan")}, "timeout: must be more than 0, not nan"),
        ({"timeout": "1"}, "timeout: must be more than 0, not '1'"),
        ({"timeout": 1, "polling_interval": 2}, "polling_interval: must be more than 0, and no more than timeout"),
    ],
)
def test_waiting_for_what_cannot_come(client, given, words):
    with pytest.raises(ConfigError) as caught:
        client.wait_for_job_status("any", **given)
    assert words in str(caught.value)


def test_jobs_and_runtimes_that_there_are_not(client):
    for ask in (client.get_job, client.delete_job, client.get_job_events, client.wait_for_job_status):
        with pytest.raises(UserError, match="nobody"):
            ask("nobody")
        for none in (None, 5, "", "\udcff", "No_body", "../nobody", "n" * 64):
            with pytest.raises(UserError, match="there is no job of this name"):
                ask(none)
    with pytest.raises(UserError, match="nobody"):
        client.get_runtime("nobody")


def test_packages_of_a_runtime(client):
    assert "torch" in client.get_runtime_packages("torch-distributed")


def test_a_backend_is_one_of_ours():
    with pytest.raises(ConfigError, match=r"backend_config: str is not LocalBackendConfig"):
        TrainerClient("local")
    assert TrainerClient(LocalBackendConfig(home="/nowhere")) is not None


def test_column_maps_by_kubeflows_names(client):
    rows = TorchTuneInstructDataset(column_map={"input": "question", "output": "answer"})
    source = dry(client, trainer=BuiltinTrainer(TorchTuneConfig(dataset_preprocess_config=rows))).config["data"][
        "train"
    ][0]
    assert source["columns"] == {"prompt": "question", "completion": "answer"}
    assert source["options"] == {"template": "chat"}


def test_the_user_of_an_address_over_ssh_is_no_secret() -> None:
    told: list[ConfigError] = []
    check_packages(["own @ git+ssh://git@host/own.git", "git+ssh://git:hidden@host/own.git"], "packages", told)
    assert [error.where for error in told] == ["packages.1"]

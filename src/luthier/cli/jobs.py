"""`luthier jobs`: submit, list, get, logs, wait, events, suspend, resume, delete."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from luthier.cli.frame import Answer, Arguments, JsonOption, run_config, verb
from luthier.cli.job_lines import ENDED, details, event_line, jobs_table, line_of, plain
from luthier.errors import ConfigError, UserError

if TYPE_CHECKING:
    from luthier.jobs import Initializer, ModelExporter, TrainerClient
    from luthier.jobs.types import TrainJob

app = verb("jobs")

BackendOption = Annotated[
    Literal["local", "kubernetes", "slurm"], typer.Option("--backend", help="Where jobs run.", envvar="LUTHIER_BACKEND")
]
BackendSettings = Annotated[
    list[str] | None,
    typer.Option("--backend-option", metavar="KEY=VALUE", help="Of the backend: namespace, context, partition, ..."),
]
NameArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
NamesArgument = Annotated[list[str], typer.Argument(metavar="JOB...", help="Their names.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="Go on telling until the job has ended.")]

_UNSAID = "<the runtime's>"
"""Stands for the model of a config that names none."""
_PAUSE = 0.5
_S3 = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY", "region": "AWS_REGION"}
_S3 |= {"endpoint": "AWS_ENDPOINT_URL"}


@app.callback(help="Fine-tune as jobs. They outlive the command: submit one, and look again later.")
def _jobs() -> None:
    pass


@app.command()
def submit(
    arguments: Arguments = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="NAME", help="What to start from; `luthier runtimes` lists them.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The job's name, instead of a random one.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="URI", help="Fetch this model first: hf://, s3://, file://, ...")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="URI", help="Fetch this data set first, into dataset/.")
    ] = None,
    export: Annotated[
        str | None, typer.Option("--export", metavar="URI", help="Take the result there: hf://, s3://, gs://, file://.")
    ] = None,
    form: Annotated[Literal["merged", "adapter"], typer.Option("--export-form", help="What is exported.")] = "merged",
    nnodes: Annotated[int | None, typer.Option("--nnodes", metavar="N", help="Machines.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", metavar="N", help="Processes of each.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="Who trains: luthier, huggingface.")] = "luthier",
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the job, start nothing, show it.")] = False,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Submit a fine-tune: `luthier jobs submit --runtime luthier-qwen2.5-0.5b adapter.rank=16 train.steps=100`.

    What the config leaves out comes from the runtime. Tokens come from the environment: HF_TOKEN, AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL.
    """
    from luthier.jobs import BuiltinTrainer, LuthierConfig, Name

    config = run_config(arguments, defaults={"model": _UNSAID, "data": {}})
    given = config.model_dump(mode="json", exclude_unset=True)
    given = {key: value for key, value in given.items() if value not in (_UNSAID, {}) or key == "adapter"}
    trainer = BuiltinTrainer(LuthierConfig(**given, num_nodes=nnodes, num_procs_per_node=nproc), engine=engine)
    client = client_of(backend, settings)
    asked: dict[str, Any] = {
        "runtime": runtime,
        "trainer": trainer,
        "initializer": _initializer(model, data),
        "options": [Name(name)] if name is not None else None,
        "exporter": _exporter(export, form) if export is not None else None,
    }
    if dry_run:
        from luthier.config.nodes import dump
        from luthier.jobs.wire import described

        spec = described(client.train(**asked, dry_run=True))
        return Answer(spec, dump(spec).splitlines())
    submitted = client.train(**asked)
    if not watch:
        return Answer(
            {"name": submitted}, [f"submitted {submitted}; `luthier jobs get {submitted} --watch` follows it"]
        )
    job = _watched(client, submitted, as_json=as_json)
    return Answer({"name": submitted, "job": plain(job)}, [], code=0 if job.status == "Complete" else 1)


@app.command("list")
def list_jobs(
    runtime: Annotated[str | None, typer.Option("--runtime", metavar="NAME", help="Only jobs of this one.")] = None,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    watch: Annotated[bool, typer.Option("--watch", help="List them again at every change, until interrupted.")] = False,
    as_json: JsonOption = False,
) -> Answer:
    """List jobs, the oldest first."""
    client = client_of(backend, settings)
    jobs = client.list_jobs(runtime)
    if watch:
        _refuse_endless(as_json)
        _tell_changes(lambda: [*jobs_table(client.list_jobs(runtime)), ""], whole=True)
    return Answer({"jobs": [plain(job) for job in jobs]}, jobs_table(jobs))


@app.command()
def get(
    name: NameArgument,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Show a job: its status, progress and steps."""
    client = client_of(backend, settings)
    job = _watched(client, name, as_json=as_json) if watch else client.get_job(name)
    return Answer(plain(job), details(job))


@app.command()
def logs(
    name: NameArgument,
    step: Annotated[str, typer.Option("--step", help="node-N, dataset-initializer, model-initializer, exporter.")] = (
        "node-0"
    ),
    watch: Annotated[bool, typer.Option("--watch", "--follow", help="Print lines as they come, to the end.")] = False,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    as_json: JsonOption = False,
) -> Answer:
    """Print the log of a step."""
    lines = client_of(backend, settings).get_job_logs(name, step, follow=watch)
    if as_json:
        return Answer({"name": name, "step": step, "lines": list(lines)})
    for line in lines:
        print(line, flush=watch)
    return Answer({}, [])


@app.command()
def wait(
    name: NameArgument,
    status: Annotated[
        list[str] | None, typer.Option("--status", help="Complete, when left out; one of several.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait.")] = 600.0,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    as_json: JsonOption = False,
) -> Answer:
    """Wait until a job is complete; say why when it fails."""
    pause = min(_PAUSE, timeout)
    job = client_of(backend, settings).wait_for_job_status(name, set(status or ("Complete",)), timeout, pause)
    return Answer(plain(job), [f"{name} is {job.status}"])


@app.command()
def events(
    name: NameArgument,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> Answer:
    """Say what has happened to a job."""
    client = client_of(backend, settings)

    def told() -> list[str]:
        return [event_line(event) for event in client.get_job_events(name)]

    if watch:
        _refuse_endless(as_json)
        _tell_changes(told, until=lambda: client.get_job(name).status in ENDED)
        return Answer({}, [])
    return Answer({"events": client.get_job_events(name)}, told())


@app.command()
def suspend(
    names: NamesArgument,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    as_json: JsonOption = False,
) -> Answer:
    """Let jobs stop and wait: a run saves a checkpoint first."""
    client = client_of(backend, settings)
    told = [f"{name} is asked to stop; `luthier jobs resume {name}` lets it go on" for name in names]
    return _with_each(names, client.suspend_job, "suspended", told)


@app.command()
def resume(
    names: NamesArgument,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    as_json: JsonOption = False,
) -> Answer:
    """Let suspended jobs go on when their turn comes: a run from its last checkpoint."""
    client = client_of(backend, settings)
    return _with_each(names, client.resume_job, "resumed", [f"{name} goes on when its turn comes" for name in names])


@app.command()
def delete(
    names: NamesArgument,
    backend: BackendOption = "local",
    settings: BackendSettings = None,
    as_json: JsonOption = False,
) -> Answer:
    """End jobs, and forget them with their files."""
    client = client_of(backend, settings)
    return _with_each(names, client.delete_job, "deleted", [f"deleted {', '.join(names)}"])


# --- what they share --------------------------------------------------------------------------------------------------


def client_of(backend: str, settings: Sequence[str] | None) -> TrainerClient:
    """The client of a backend.

    Args:
        backend: its name.
        settings: KEY=VALUE of its config.

    Raises:
        ConfigError: a setting that it does not have.
    """
    from luthier.jobs import KubernetesBackendConfig, LocalBackendConfig, SlurmBackendConfig, TrainerClient

    kinds: dict[str, Any] = {"local": LocalBackendConfig, "kubernetes": KubernetesBackendConfig}
    kind = kinds.get(backend, SlurmBackendConfig)
    known = {field.name: field.type for field in dataclasses.fields(kind) if field.name != "client_configuration"}
    given: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or key not in known:
            remedy = f"write KEY=VALUE with one of {', '.join(known)}"
            raise ConfigError(f'"{setting}" is no setting of {backend}', where="--backend-option", remedy=remedy)
        if known[key] == "int":
            if not (value.isascii() and value.isdigit()):
                raise ConfigError(f'"{value}" is not a whole number', where=f"--backend-option {key}")
            given[key] = int(value)
        else:
            given[key] = (*given.get(key, ()), value) if "tuple" in str(known[key]) else value
    return TrainerClient(kind(**given))


def _with_each(names: Sequence[str], work: Callable[[str], None], done: str, lines: list[str]) -> Answer:
    """Do something with each of several jobs; one that it cannot be done with does not keep the others from it."""
    from luthier.config.faults import raise_all

    errors = []
    for name in names:
        try:
            work(name)
        except UserError as error:
            errors.append(error)
    raise_all(errors)
    return Answer({done: names}, lines)


def _initializer(model: str | None, data: str | None) -> Initializer | None:
    from luthier.jobs import DatasetInitializer, Initializer, ModelInitializer, S3DatasetInitializer, S3ModelInitializer

    if model is None and data is None:
        return None
    kinds: Any = {True: (S3DatasetInitializer, S3ModelInitializer), False: (DatasetInitializer, ModelInitializer)}
    dataset, weights = (
        kinds[uri.startswith("s3://")][place](uri, **_secrets(uri)) if uri is not None else None
        for place, uri in enumerate((data, model))
    )
    return Initializer(dataset, weights)


def _exporter(uri: str, form: Literal["merged", "adapter"]) -> ModelExporter:
    from luthier.jobs import ModelExporter

    return ModelExporter(uri, form, **_secrets(uri))


def _secrets(uri: str) -> dict[str, str]:
    """What opens a place, from the environment: a command line can be read by everyone."""
    names = _S3 if uri.startswith("s3://") else {"access_token": "HF_TOKEN"} if uri.startswith("hf://") else {}
    return {field: os.environ[name] for field, name in names.items() if os.environ.get(name)}


def _watched(client: TrainerClient, name: str, *, as_json: bool) -> TrainJob:
    """Tell what changes about a job until it has ended."""
    last = [client.get_job(name)]

    def now() -> list[str]:
        last[0] = client.get_job(name)
        return [line_of(last[0])]

    def ended() -> bool:
        return last[0].status in ENDED

    _tell_changes(now, until=ended, quiet=as_json)
    return last[0]


def _tell_changes(
    told: Callable[[], list[str]],
    *,
    until: Callable[[], bool] = lambda: False,
    whole: bool = False,
    quiet: bool = False,
) -> None:
    """Print lines that were not there before (or all of them, with `whole`, when one changed) until the end."""
    before: list[str] = []
    while True:
        over = until()  # asked first: what is told afterwards is the end
        lines = told()
        if not quiet:
            for line in lines if whole and lines != before else [line for line in lines if line not in before]:
                print(line, flush=True)
        before = lines
        if over:
            return
        time.sleep(_PAUSE)


def _refuse_endless(as_json: bool) -> None:
    if as_json:
        raise ConfigError("prints one object, and watching has many", where="--json", remedy="leave out --watch")

"""What a cluster with Kubeflow Trainer 2.3 admits, told from its CRDs and from what is documented of its plugins.

Four gates: the CRD's schema, made strict, so that a field that the cluster would drop is a refusal; keys of list-maps,
each once; the CRD's CEL rules; the rules of the torch and JobSet plugins, written here anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import yaml

DATA = Path(__file__).with_name("data")
Object = dict[str, Any]

_CRDS = {"TrainJob": "trainjobs", "ClusterTrainingRuntime": "clustertrainingruntimes"}
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
TUNE = ["tune", "run"]
TUNE_MODELS = {"llama3_2/1B", "llama3_2/3B", "llama3_3/70B", "qwen2_5/1.5B"}
FIXED_BY_RUNTIME = {"output_dir", "tokenizer.path", "tokenizer.merges_file", "checkpointer.checkpoint_dir"}
OF_TRAIN_JOB = {"node", "dataset-initializer", "model-initializer"}
"""Containers whose variables a TrainJob says itself, not by patches."""


def upstream_runtimes() -> list[Object]:
    """The nine."""
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((DATA / "runtimes").glob("*.yaml"))]


def refusals(thing: Object, *, old: Object | None = None) -> list[str]:
    """All that the CRD of an object has against it; with `old`, also against the change."""
    schema = _schema(thing["kind"])
    found = [f"{error.json_path}: {error.message}" for error in _validator(thing["kind"]).iter_errors(thing)]
    return [*found, *_twice(thing, schema, "$"), *_against_rules(thing, old, schema, "$")]


@cache
def _schema(kind: str) -> Object:
    path = DATA / "crds" / f"trainer.kubeflow.org_{_CRDS[kind]}.yaml"
    crd = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = crd["spec"]["versions"]
    schema: Object = version["schema"]["openAPIV3Schema"]
    return schema


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_strict(_schema(kind)))


def _strict(schema: Any) -> Any:
    """A schema that takes no field that it does not list; a cluster drops those without a word."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: _strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def _twice(value: Any, schema: Object, path: str) -> Iterator[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if keys and isinstance(value, list):
        named = [tuple(item.get(key) for key in keys) for item in value]
        yield from (f"{path}: {name} is there twice" for name in sorted(set(named)) if named.count(name) > 1)
    for part, below, name in _parts(value, schema):
        yield from _twice(part, below, f"{path}{name}")


def _against_rules(value: Any, old: Any, schema: Object, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations") or []:
        about_change = "oldSelf" in rule["rule"]
        if about_change and old is None:
            continue
        named = {"self": celpy.json_to_cel(value)} | ({"oldSelf": celpy.json_to_cel(old)} if about_change else {})
        if not _program(rule["rule"]).evaluate(named):
            yield f"{path}: {rule['message']}"
    for part, below, name in _parts(value, schema):
        yield from _against_rules(part, _part_of(old, name), below, f"{path}{name}")


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _parts(value: Any, schema: Object) -> Iterator[tuple[Any, Object, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            below = (schema.get("properties") or {}).get(name) or schema.get("additionalProperties")
            if isinstance(below, dict):
                yield part, below, f".{name}"
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, part in enumerate(value):
            yield part, schema["items"], f"[{number}]"


def _part_of(old: Any, name: str) -> Any:
    if isinstance(old, Mapping):
        return old.get(name[1:])
    number = int(name[1:-1]) if name.startswith("[") else -1
    return old[number] if isinstance(old, list) and 0 <= number < len(old) else None


# --- plugins ----------------------------------------------------------------------------------------------------------


def plugin_refusals(train_job: Object, runtime: Object) -> list[str]:
    """What the torch and JobSet plugins have against a TrainJob of a runtime."""
    spec = train_job["spec"]
    return [*_against_torch(spec, runtime), *_against_jobset(spec, runtime), *_against_names(train_job, runtime)]


def _against_names(train_job: Object, runtime: Object) -> Iterator[str]:
    """JobSet's own webhook, which sees what Trainer has made."""
    nodes = (train_job["spec"].get("trainer") or {}).get("numNodes") or runtime["spec"]["mlPolicy"].get("numNodes") or 1
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        index = nodes - 1 if job["name"] == "node" else 0
        if len(f"{train_job['metadata']['name']}-{job['name']}-0-{index}-abcde") > 63:
            yield "JobSet name is too long, pod names generated for this JobSet will exceed 63 characters"


def _against_torch(spec: Object, runtime: Object) -> Iterator[str]:
    trainer = spec.get("trainer")
    if "torch" not in runtime["spec"]["mlPolicy"] or trainer is None:
        return
    taken = sorted(RESERVED & {entry["name"] for entry in trainer.get("env") or []})
    if taken:
        yield f"spec.trainer.env: must not have reserved envs {taken}"
    if trainer.get("command") == TUNE:
        yield from _against_tune(spec, trainer, runtime)


def _against_tune(spec: Object, trainer: Object, runtime: Object) -> Iterator[str]:
    model, nodes = tune_model(spec["runtimeRef"]["name"]), trainer.get("numNodes", 1)
    args = trainer.get("args") or []
    lora = any("model.lora_attn_modules" in arg for arg in args)
    if model not in TUNE_MODELS:
        yield f"spec.runtimeRef.name: must have a supported pretrained model, not {model}"
    if nodes > 1 and model != "llama3_3/70B":
        yield f"spec.trainer.numNodes: must be 1 for {model}"
    if nodes > 1 and lora:
        yield "spec.trainer.numNodes: LoRA is not supported on several nodes"
    for number, arg in enumerate(args):
        if arg.partition("=")[0] in FIXED_BY_RUNTIME:
            yield f"spec.trainer.args[{number}]: is managed by the runtime"
    quantised = any("model.quantize_base=True" in arg for arg in args) and "model.use_dora=True" not in args
    if quantised and (model == "qwen2_5/1.5B" or (not _single(trainer, runtime) and model.startswith("llama3_2"))):
        yield f"spec.trainer: QLoRA is not supported for {model} here"


def tune_model(runtime: str) -> str:
    """The model that a runtime's name means to the torch plugin."""
    parts = runtime.split("-")
    return f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""


def _single(trainer: Object, runtime: Object) -> bool:
    limits = (trainer.get("resourcesPerNode") or _node(runtime).get("resources") or {}).get("limits") or {}
    return trainer.get("numNodes", 1) == 1 and (
        trainer.get("numProcPerNode") == 1 or str(limits.get("nvidia.com/gpu")) == "1"
    )


def tune_command(train_job: Object, runtime: Object) -> list[str]:
    """What the torch plugin makes of `tune run`."""
    trainer, name = train_job["spec"]["trainer"], train_job["metadata"]["name"]
    args, nodes = trainer.get("args") or [], trainer.get("numNodes", 1)
    lora = any("model.lora_attn_modules" in arg for arg in args)
    quantised = "model.quantize_base=True" in args and "model.use_dora=True" not in args
    single = _single(trainer, runtime)
    kind = "_qlora" if quantised else "_lora" if lora and nodes == 1 else "_full"
    recipe = f"{'full' if kind == '_full' else 'lora'}_finetune_{'single_device' if single else 'distributed'}"
    suffix = f"{kind}{'_single_device' if single else '_multinode' if nodes > 1 else ''}"
    meeting = (
        [] if trainer.get("numProcPerNode") == 1 and nodes == 1 else [f"--rdzv_endpoint={name}-node-0-0.{name}:29500"]
    )
    fixed = [word for word in _node(runtime).get("command") or [] if word.partition("=")[0] in FIXED_BY_RUNTIME]
    return [
        *TUNE,
        *meeting,
        recipe,
        "--config",
        f"{tune_model(train_job['spec']['runtimeRef']['name'])}{suffix}",
        *fixed,
    ]


def _against_jobset(spec: Object, runtime: Object) -> Iterator[str]:
    jobs = {job["name"]: _containers(job) for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    for field, step in (("dataset", "dataset-initializer"), ("model", "model-initializer")):
        if field in (spec.get("initializer") or {}):
            container = jobs.get(step, {}).get(step)
            if container is None:
                yield f"spec.runtimeRef: must have {step} job and container"
            elif "initializer" not in {mount["name"] for mount in container.get("volumeMounts") or []}:
                yield f"spec.runtimeRef: {step} must mount the volume initializer"
    for patch in spec.get("runtimePatches") or []:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9][-\w.]*", patch["manager"]):
            yield f"spec.runtimePatches: manager {patch['manager']} is no domain-prefixed path"
        for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"].get("spec") or {}
            for container in [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]:
                if container["name"] not in jobs.get(job["name"], {}):
                    yield f"spec.runtimePatches: {job['name']}/{container['name']} is not in the runtime"
                elif container.get("env") and container["name"] in OF_TRAIN_JOB:
                    yield f"spec.runtimePatches: must not have envs for the {container['name']} container"
            if job["name"] not in jobs:
                yield f"spec.runtimePatches: there is no job {job['name']}"


def _containers(job: Object) -> dict[str, Object]:
    pod = job["template"]["spec"]["template"]["spec"]
    return {container["name"]: container for container in [*pod["containers"], *(pod.get("initContainers") or [])]}


def _node(runtime: Object) -> Object:
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        labels = (job["template"].get("metadata") or {}).get("labels") or {}
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            return _containers(job)["node"]
    raise AssertionError("the runtime has no trainer")

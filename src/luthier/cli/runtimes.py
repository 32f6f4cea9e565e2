"""`luthier runtimes`."""

from __future__ import annotations

from luthier.cli.frame import Answer, JsonOption, table, verb
from luthier.cli.jobs import BackendOption, BackendSettings, client_of
from luthier.jobs.types import Runtime

app = verb("runtimes")

HEAD = ("Runtime", "Trainer Type", "Framework", "Pretrained Model", "Accelerator", "Count")
_TYPES = {"BuiltinTrainer": "builtin-trainer", "CustomTrainer": "custom-trainer"}


@app.command()
def runtimes(backend: BackendOption = "local", settings: BackendSettings = None, as_json: JsonOption = False) -> Answer:
    """List what `luthier jobs submit --runtime` takes."""
    found = client_of(backend, settings).list_runtimes()
    return Answer({"runtimes": found}, table(HEAD, [_row(runtime) for runtime in found]))


def _row(runtime: Runtime) -> list[str]:
    own = runtime.trainer
    if own is None:
        return [runtime.name, *["<undefined>"] * (len(HEAD) - 1)]
    kind = _TYPES.get(str(own.trainer_type), str(own.trainer_type))
    return [
        runtime.name,
        kind,
        str(own.framework),
        runtime.pretrained_model or "<undefined>",
        own.device,
        str(own.device_count),
    ]

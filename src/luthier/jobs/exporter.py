"""`python -m luthier.jobs.exporter`: the step that takes what was trained elsewhere.

The environment says where to, by the names that initializers have: `STORAGE_URI` (hf://owner/name, s3://, gs://,
file://), `EXPORT_FORM` ("merged" for a whole model, the default, or "adapter" for PEFT files), and with what access.
The run is `output/` below `LUTHIER_WORKSPACE` (/workspace); `luthier export` writes it as `export/` beside it, a
process of its own since it needs torch and this one does not. Its exit code, where it fails, is this one's too.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luthier.errors import EXIT_USER_ERROR, UserError
from luthier.jobs.exporter_targets import Target, target_of
from luthier.jobs.initializers.fetch import fetched
from luthier.jobs.initializers.progress import say
from luthier.jobs.initializers.step import run_step, workspace
from luthier.jobs.spec import MODEL
from luthier.jobs.storage import Access, parse

FORMS = {"merged": "--merge", "adapter": "--adapter"}
EXPORT = "export"


def main(environment: Mapping[str, str]) -> int:
    """Export and upload; returns what to leave with.

    Raises:
        UserError: the target, or what is asked for.
    """
    place = parse(environment.get("STORAGE_URI", ""))
    form = environment.get("EXPORT_FORM") or "merged"
    if form not in FORMS:
        raise UserError(f"{form!r} is no form of a model", where="EXPORT_FORM", remedy=f"set {' or '.join(FORMS)}")
    root = workspace(environment)
    target = target_of(place, Access.of(environment))
    target.prepare()  # before minutes of work, since most that goes wrong with a target shows here
    if code := _write(root, form):
        return code
    name_base(root)
    _upload(target, root / EXPORT, place.uri)
    return 0


def _write(root: Path, form: str) -> int:
    """`luthier export`, which says itself what is wrong; returns its exit code."""
    if not (root / "output").is_dir():
        raise UserError("there is no run to export", where=str(root / "output"), remedy="train first")
    if not (root / "output" / "config.yaml").is_file():
        return _take(root, form)
    say(f"exporter: writing {form} weights of {root / 'output'}")
    command = [sys.executable, "-m", "luthier", "export", "output", "--output", EXPORT, FORMS[form]]
    with subprocess.Popen(command, cwd=root) as process:

        def pass_on(number: int, frame: Any) -> None:
            process.send_signal(number)

        earlier = signal.signal(signal.SIGTERM, pass_on)
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, earlier)
    return 128 - code if code < 0 else code if code in (0, EXIT_USER_ERROR, 130, 143) else 1


def _take(root: Path, form: str) -> int:
    """What another engine than Luthier's has exported itself, as it is."""
    done = root / "output" / EXPORT
    if not done.is_dir():
        raise UserError("holds no run of Luthier's, and no export", where=str(root / "output"))
    there = "adapter" if (done / "adapter_config.json").is_file() else "merged"
    if form != there:
        raise UserError(
            f"{form} weights are asked for, and the run's engine has left {there} ones", where="EXPORT_FORM"
        )
    shutil.rmtree(root / EXPORT, ignore_errors=True)
    shutil.copytree(done, root / EXPORT)
    return 0


def name_base(root: Path) -> None:
    """Let adapters name the repository that their base came from: `model/`, where it lay, is nowhere else."""
    came = fetched(root / MODEL).get("of", {}).get("uri", "")
    config = root / EXPORT / "adapter_config.json"
    if not came.startswith("hf://") or not config.is_file():
        return
    fields = json.loads(config.read_text(encoding="utf-8"))
    if fields.get("base_model_name_or_path") == MODEL:
        place = parse(came)
        fields |= {"base_model_name_or_path": place.repo, "revision": place.revision}
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _upload(target: Target, directory: Path, uri: str) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    say(f"exporter: taking {len(files)} files to {uri}")
    target.put(directory, [path.relative_to(directory).as_posix() for path in files])
    say(f"exporter: {len(files)} files in {uri}")


if __name__ == "__main__":
    run_step(main)

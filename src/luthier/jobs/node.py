"""What a node's process does, on every backend: `python -m luthier.jobs.node`.

It reads the job from the file that `LUTHIER_JOB_FILE` names, or from `LUTHIER_JOB` itself (JSON: engine and config, or
a function; files to lay into the workspace), and its own number and the meeting point from `PET_*`, as Kubeflow sets
them. It starts the engine in its working directory, passes signals on, says to Kubeflow Trainer how far the run is, and
leaves with the engine's exit code.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from luthier.errors import EXIT_USER_ERROR, ConfigError, UserError
from luthier.jobs.engines import engine
from luthier.jobs.engines.function import function_command
from luthier.jobs.files import lay, write
from luthier.jobs.processes import dying_with
from luthier.jobs.progress import SERVER_URL, ProgressPoster
from luthier.jobs.spec import OUTPUT

JOB, JOB_FILE = "LUTHIER_JOB", "LUTHIER_JOB_FILE"
_OWN = Path(".luthier")


def main() -> int:
    """Be a node; returns what to leave with."""
    children = Children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, children.pass_on)
    try:
        job = read_job(os.environ)
        rank = os.environ.get("PET_NODE_RANK", "0")
        own = _OWN / f"node-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        environment.setdefault("PET_NNODES", str(job.get("num_nodes", 1)))
        environment.setdefault("PET_NPROC_PER_NODE", str(job.get("nproc_per_node", "auto")))
        for name in (JOB, JOB_FILE):
            environment.pop(name, None)
        lay(job.get("files") or {}, Path())
        function = job.get("function")
        if function is not None:
            python = sys.executable
            if function.get("packages"):
                python = str(own / "venv" / "bin" / "python")
                if code := install(function, own, children, environment):
                    return code
            return children.run(function_command(function, own, python), environment)
        config = own / "config.yaml"
        command = engine(job["engine"]).command(config)
        write_config(config, job["config"])
        url = os.environ.get(SERVER_URL)
        if not url or rank != "0":
            return children.run(command, environment)
        poster = ProgressPoster(Path(job["config"].get("output", OUTPUT)), job["config"], url)
        poster.start()
        try:
            return children.run(command, environment)
        finally:
            poster.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def read_job(environment: Mapping[str, str]) -> dict[str, Any]:
    """The job that the environment speaks of.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    path = environment.get(JOB_FILE)
    where = JOB_FILE if path else JOB
    try:
        text = Path(path).read_text(encoding="utf-8") if path else environment.get(JOB)
        job = json.loads(text) if text else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", where=where) from None
    except ValueError as error:
        raise ConfigError(f"is not JSON ({error})", where=where) from None
    if not isinstance(job, dict) or (job.get("function") is None and (not job.get("engine") or not job.get("config"))):
        raise ConfigError(
            "has no job", where=where, remedy=f"set {JOB} to JSON with a function, or with engine and config"
        )
    return job


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a run for its engine."""
    from luthier.config.nodes import dump

    write(path, dump(dict(config)))


class Children:
    """Runs one process after the other; signals that come meanwhile are theirs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handler of a signal."""
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a process to its end; returns its exit code, 128 and more where a signal ended it."""
        if self._signal is not None:
            return 128 + self._signal
        # A group of its own: a terminal's Ctrl-C reaches this process alone, and is passed on once.
        self._process = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=dying_with(os.getpid()))
        if self._signal is not None:  # came in between
            self._process.send_signal(self._signal)
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code


def install(function: Mapping[str, Any], own: Path, children: Children, environment: Mapping[str, str]) -> int:
    """Install a function's packages into an environment of its own that sees ours behind them; returns pip's exit code.

    Args:
        own: directory for `venv/`; what is there already is kept.
    """
    place = own / "venv"
    if not (place / "bin" / "python").exists():
        venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    write(packages / "ours.pth", "".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    python = str(place / "bin" / "python")
    if importlib.util.find_spec("pip") is None and (code := children.run([python, "-m", "ensurepip"], environment)):
        return code
    wanted = own / "requirements.txt"
    write(wanted, "".join(f"{package}\n" for package in function["packages"]))
    urls = pip_variables(function.get("pip_index_urls") or ())
    # Addresses may have a password in them, and command lines can be read by all.
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    return children.run([python, "-m", "pip", "install", *options, "-r", str(wanted)], {**environment, **urls})


def pip_variables(urls: Sequence[str]) -> dict[str, str]:
    """What tells pip where packages are: the first is the index, the others are extra ones; without any its own."""
    extra = {"PIP_EXTRA_INDEX_URL": " ".join(urls[1:])} if len(urls) > 1 else {}
    return {"PIP_INDEX_URL": urls[0], **extra} if urls else {}


if __name__ == "__main__":
    sys.exit(main())

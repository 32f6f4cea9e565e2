"""Makes an image that has no Luthier do a job: `python -c THIS_TEXT WORDS`.

This file's text travels in the TrainJob's command, so it takes nothing but Python itself. The job comes in
`LUTHIER_JOB`, as `luthier.jobs.node` reads it: its files are laid into the working directory, its function is written
down behind the words, and they are run.
"""

import json
import os
import subprocess
import sys
import tempfile

CALL = """

if __name__ == "__main__":
    import json as _json
    import pathlib as _pathlib

    {name}(**_json.loads(_pathlib.Path(__file__).with_name("arguments.json").read_text(encoding="utf-8")))
"""


def main() -> int:
    """Become what does the job; returns pip's exit code where a package cannot be had."""
    job = json.loads(os.environ.pop("LUTHIER_JOB"))
    for name, text in job["files"].items():
        write(name, text)
    words = sys.argv[1:]
    if (function := job.get("function")) is not None:
        if function["packages"] and (code := install(function["packages"])):
            return code
        directory = tempfile.mkdtemp()
        program = os.path.join(directory, "function.py")
        write(program, function["source"].rstrip() + "\n" + CALL.format(name=function["name"]))
        write(os.path.join(directory, "arguments.json"), json.dumps(function["args"]))
        words.append(program)
    sys.stdout.flush()
    os.execvp(words[0], words)


def install(packages: list[str]) -> int:
    """Install packages; returns pip's exit code."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    # The image is this job's alone: there is no system to break.
    return subprocess.call([*pip, *packages], env={**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"})


def write(path: str, text: str) -> None:
    """Write a file that several nodes may write at once, all the same."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=os.path.dirname(path) or ".")
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())

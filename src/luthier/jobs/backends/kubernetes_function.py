"""Runs a training function in an image that has no Luthier: `python -c THIS_TEXT torchrun`.

This file's text travels in the TrainJob's command, so it takes nothing but Python itself. The function comes in
`LUTHIER_JOB`, as `luthier.jobs.node` reads it; what follows in the command starts the processes.
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
    """Install what the function needs, write it down, and become what starts it; returns pip's exit code else."""
    function = json.loads(os.environ.pop("LUTHIER_JOB"))["function"]
    if function["packages"]:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
        # The image is this job's alone: there is no system to break.
        code = subprocess.call([*pip, *function["packages"]], env={**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"})
        if code:
            return code
    directory = tempfile.mkdtemp()
    program = os.path.join(directory, "function.py")
    with open(program, "w", encoding="utf-8") as file:
        file.write(function["source"].rstrip() + "\n" + CALL.format(name=function["name"]))
    with open(os.path.join(directory, "arguments.json"), "w", encoding="utf-8") as file:
        json.dump(function["args"], file)
    sys.stdout.flush()
    os.execvp(sys.argv[1], [*sys.argv[1:], program])


if __name__ == "__main__":
    sys.exit(main())

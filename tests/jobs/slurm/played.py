"""Small stand-ins for Slurm's commands, which do on one machine what the manual pages say of the options used here.

    python played.py sbatch --parsable --export=PATH script.sh

Everything is in the directory that PLAYED_SLURM names: `jobs/ID.json` is what the controller knows of a job; files that
a test makes there say what befalls jobs:

    ID.held       the job stays PENDING (JobHeldUser)
    gate          jobs stay PENDING (Resources) as long as it is there
    ID.befall     "PREEMPTED": the job is put back into the queue; another state: it ends with that state
    no-accounting sacct says that accounting is disabled
    forgetful     squeue knows nothing of jobs that have ended
    refusal       what sbatch says instead of taking a job
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(os.environ["PLAYED_SLURM"])
GRACE = 10.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"}
EXPORTED = re.compile(r"SLURM_\w+|PLAYED_SLURM")


def options(words: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """Options of a command and what follows them; one that is not known is refused, as Slurm does."""
    found = {}
    for place, word in enumerate(words):
        if not word.startswith("--"):
            return found, words[place:]
        name, _, value = word[2:].partition("=")
        if name not in known:
            fail(f"unrecognized option '{word}'")
        found[name] = value
    return found, []


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"{Path(sys.argv[1]).name}: error: {message}", file=sys.stderr)
    sys.exit(code)


def load(number: str) -> dict[str, Any]:
    return json.loads((ROOT / "jobs" / f"{number}.json").read_text())


def save(number: str, **changed: Any) -> None:
    path = ROOT / "jobs" / f"{number}.json"
    job = (load(number) if path.exists() else {}) | changed
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(job))
    os.replace(aside, path)


def known(numbers: str) -> list[str]:
    return [number for number in numbers.split(",") if (ROOT / "jobs" / f"{number}.json").exists()]


# --- the commands ---------------------------------------------------------------------------------------------------


def sbatch(words: list[str]) -> None:
    given, rest = options(words, {"parsable", "export"})
    if (ROOT / "refusal").exists():
        fail((ROOT / "refusal").read_text())
    script = Path(rest[0]).read_text()
    named = dict(
        match.group(1, 2) for match in re.finditer(r'^#SBATCH --([\w-]+)(?:="?(.*?)"?)?$', script, re.MULTILINE)
    )
    names = given["export"].split(",")
    kept = {k: v for k, v in os.environ.items() if k in names or "ALL" in names or EXPORTED.fullmatch(k)}
    (ROOT / "jobs").mkdir(exist_ok=True)
    number = str(len(list((ROOT / "jobs").glob("*.json"))) + 101)
    (ROOT / f"{number}.sh").write_text(script)
    save(number, state="PENDING", reason="None", restarts=0, code="0:0", named=named, environment=kept)
    subprocess.Popen(
        [sys.executable, __file__, "controller", number],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    print(number)


def srun(words: list[str]) -> None:
    given, command = options(
        words,
        {"job-name", "nodes", "ntasks", "ntasks-per-node", "overlap", "output", "open-mode", "kill-on-bad-exit"},
    )
    job, tasks = os.environ["SLURM_JOB_ID"], int(given["ntasks"])
    steps = ROOT / "steps" / job
    steps.mkdir(parents=True, exist_ok=True)
    own = f"{len(list(steps.iterdir()))}"
    (steps / own).mkdir()
    running = []
    for task in range(tasks):
        output = given["output"].replace("%n", str(task)).replace("%%", "%")
        about = {"SLURM_PROCID": task, "SLURM_NODEID": task, "SLURM_LOCALID": 0, "SLURM_NTASKS": tasks}
        about |= {"SLURM_STEP_ID": own, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_NODELIST": "localhost"}
        with open(output, "ab") as out:
            running.append(
                subprocess.Popen(
                    command,
                    env=os.environ | {name: str(value) for name, value in about.items()},
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        (steps / own / str(running[-1].pid)).touch()
    worst = 0
    while running:
        for process in list(running):
            if (code := process.poll()) is not None:
                running.remove(process)
                worst = max(worst, code if code >= 0 else 128 - code)
                if code and given.get("kill-on-bad-exit") == "1":
                    for other in running:
                        os.killpg(other.pid, signal.SIGKILL)
        time.sleep(0.01)
    sys.exit(worst)


def squeue(words: list[str]) -> None:
    given, _ = options(words, {"jobs", "states", "noheader", "format"})
    assert given["format"] == "%i|%T|%r"
    found = known(given["jobs"])
    if (ROOT / "forgetful").exists():
        found = [number for number in found if load(number)["state"] not in ENDED]
    if not found and "," not in given["jobs"]:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        sys.exit(1)
    for number in found:
        job = load(number)
        print(f"{number}|{job['state']}|{job['reason']}")


def sacct(words: list[str]) -> None:
    given, _ = options(words, {"jobs", "allocations", "noheader", "parsable2", "format"})
    assert given["format"] == "JobIDRaw,State,ExitCode"
    if (ROOT / "no-accounting").exists():
        print("Slurm accounting storage is disabled", file=sys.stderr)
        sys.exit(1)
    for number in known(given["jobs"]):
        job = load(number)
        state = "CANCELLED by 1000" if job["state"] == "CANCELLED" else job["state"]
        print(f"{number}|{state}|{job['code']}")


def scancel(words: list[str]) -> None:
    (number,) = words
    if not known(number):
        fail(f"Kill job error on job id {number}: Invalid job id specified")
    (ROOT / f"{number}.befall").write_text("CANCELLED")


def scontrol(words: list[str]) -> None:
    verb, number = words
    if verb == "requeuehold":
        if load(number)["state"] == "PENDING":
            print(f"Job is pending execution for job {number}", file=sys.stderr)
            sys.exit(1)
        (ROOT / f"{number}.held").touch()
        (ROOT / f"{number}.befall").write_text("REQUEUED")
    elif verb == "hold":
        (ROOT / f"{number}.held").touch()
    elif verb == "release":
        (ROOT / f"{number}.held").unlink(missing_ok=True)
    else:
        fail(f"invalid keyword: {verb}")


# --- slurmctld and slurmd of one job --------------------------------------------------------------------------------


def controller(words: list[str]) -> None:
    (number,) = words
    while attempt(number):
        pass


def attempt(number: str) -> bool:
    """Wait for the turn of a job and run it; whether it is to run again."""
    while True:
        if end := befall(number):
            save(number, state=end)
            return False
        held = (ROOT / f"{number}.held").exists()
        gated = (ROOT / "gate").exists()
        if not held and not gated:
            break
        save(number, state="PENDING", reason="JobHeldUser" if held else "Resources")
        time.sleep(0.02)
    job = load(number)
    named, nodes = job["named"], int(job["named"]["nodes"])
    about = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": str(nodes)}
    about |= {"SLURM_RESTART_COUNT": str(job["restarts"])} if job["restarts"] else {}
    shutil.rmtree(ROOT / "steps" / number, ignore_errors=True)  # process ids of an attempt before are others' now
    save(number, state="RUNNING", reason="None")
    with open(named["output"].replace("%%", "%"), "ab") as out:
        script = subprocess.Popen(
            ["bash", str(ROOT / f"{number}.sh")],
            env=job["environment"] | about,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    minutes, _, seconds = named.get("time", "").rpartition(":")
    until = time.monotonic() + 60 * int(minutes) + int(seconds) if seconds else float("inf")
    while script.poll() is None:
        if state := befall(number) or ("TIMEOUT" if time.monotonic() > until else ""):
            stop(number, script)
            if state in ("PREEMPTED", "REQUEUED"):
                save(number, state="PENDING", reason="BeginTime", restarts=job["restarts"] + 1)
                return True
            save(number, state=state, code="0:15")
            return False
        time.sleep(0.02)
    code = script.returncode
    save(number, state="COMPLETED" if code == 0 else "FAILED", code=f"{code}:0" if code >= 0 else f"0:{-code}")
    return False


def befall(number: str) -> str:
    path = ROOT / f"{number}.befall"
    try:
        state = path.read_text()
    except FileNotFoundError:
        return ""
    if state:
        path.unlink()
    return state


def stop(number: str, script: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the tasks of all steps, SIGKILL to what is left after a while."""
    steps = ROOT / "steps" / number
    tasks = [int(path.name) for path in steps.glob("*/*")]
    for own in tasks:
        send(own, signal.SIGTERM)
    until = time.monotonic() + GRACE
    while script.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    for own in [*tasks, script.pid]:
        send(own, signal.SIGKILL)
    script.wait()


def send(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])

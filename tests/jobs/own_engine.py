"""An engine of somebody else's: says what it was given, and does what the run's `output` says."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luthier.jobs.engines import register_engine

PROGRAM = """
import json, os, signal, sys, yaml
run = yaml.safe_load(open(sys.argv[1]))
seen = {name: value for name, value in os.environ.items() if name.startswith(("PET_", "LUTHIER_"))}
print(json.dumps({"run": run, "environment": seen}), flush=True)
if run["then"] == "rows":
    os.makedirs(run["output"])
    open(run["output"] + "/metrics.jsonl", "w").write('{"step": 1, "step_seconds": 2.0}\\n')
if run["then"] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    open("ready", "w").close()
    signal.pause()
if run["then"] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(run["code"])
"""


@register_engine("echo")
class Echo:
    def check(self, config: Mapping[str, Any]) -> None:
        pass

    def command(self, config: Path) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(config)]

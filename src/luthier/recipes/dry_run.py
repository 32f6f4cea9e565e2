"""`luthier train --dry-run`: everything up to two steps on real data, then what the whole run would take."""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from luthier.config import RunConfig
from luthier.recipes.methods import recipe_of
from luthier.recipes.run import opened
from luthier.report.throughput import peak_memory

STEPS = 2


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Load everything, take two steps, keep nothing.

    Args:
        config: of the run; its output directory is not touched.

    Returns:
        what was found out about data and model, and what the run would take: steps, tokens, seconds, bytes.
    """
    take_step = recipe_of(config).take_step
    silent = config.report.model_copy(update={"trackers": []})  # a rehearsal is no run in anybody's dashboard
    with (
        tempfile.TemporaryDirectory(prefix="luthier-dry-run-") as scratch,
        opened(config.model_copy(update={"output": Path(scratch), "report": silent}), "never") as run,
    ):
        run.loader.rehearsed = STEPS  # a reference or a teacher is asked about no other rows
        seconds, tokens, losses = 0.0, 0, []
        for batch in islice(run.loader, STEPS):
            begin = time.perf_counter()
            losses.append(take_step(run, batch)["loss"])
            seconds, tokens = time.perf_counter() - begin, batch.tokens  # the first step also warms up
        return {
            "output": str(config.output),
            "data": run.data,
            "lora": str(run.state.lora) if run.state.lora else None,
            "losses": losses,
            "steps": run.total,
            "tokens_per_step": tokens,
            "seconds_per_step": seconds,
            "seconds": seconds * run.total,
            "tokens_per_second": tokens / seconds,
            "memory_bytes": peak_memory(run.state.device),
        }

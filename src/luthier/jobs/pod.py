"""What a node of our runtimes runs in its pod: `python -m luthier.jobs.pod [key=value ...]`.

It is `luthier.jobs.node`; words after it, the `args` of a TrainJob, are overrides of the run in `LUTHIER_JOB`, as
after `luthier train`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.errors import EXIT_USER_ERROR, ConfigError, UserError
from luthier.jobs import node


def main(overrides: Sequence[str]) -> int:
    """Be a node; returns what to leave with."""
    if overrides:
        try:
            job = node.read_job(os.environ)
            if job.get("config") is None:
                raise ConfigError("this job has no config to override", where="args", remedy="leave them out")
            os.environ[node.JOB] = json.dumps(job | {"config": overridden(job["config"], overrides)})
            os.environ.pop(node.JOB_FILE, None)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USER_ERROR
    return node.main()


def overridden(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A run with overrides laid over it.

    Args:
        config: the run as plain data.
        overrides: `key.path=value`, read as the field's type.

    Raises:
        ConfigError: all that is wrong, a sentence for each.
    """
    from luthier.config.load import load_config
    from luthier.config.nodes import dump

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump(dict(config)))
        file.flush()
        return load_config(Path(file.name), overrides).model_dump(mode="json", exclude_unset=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

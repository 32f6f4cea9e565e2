"""Luthier's own recipes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luthier.errors import ConfigError
from luthier.jobs.engines.base import register_engine


@register_engine("luthier")
class LuthierEngine:
    """`luthier train`."""

    def check(self, config: Mapping[str, Any]) -> None:
        """A run that is one by its own types is one for this engine."""
        from luthier.config.faults import raise_all
        from luthier.config.load import check_config

        _, faults = check_config(config)
        where = [".".join(("config", *fault.path)) for fault in faults]
        raise_all([ConfigError(f.what, where=w, remedy=f.remedy) for f, w in zip(faults, where, strict=True)])

    def command(self, config: Path) -> list[str]:
        return [sys.executable, "-m", "luthier", "train", str(config)]

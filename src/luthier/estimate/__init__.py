"""What a run takes, from a config and the model's `config.json` alone."""

from luthier.estimate.run import estimate, find_layouts
from luthier.estimate.text import lines

__all__ = ["estimate", "find_layouts", "lines"]

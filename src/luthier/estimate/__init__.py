"""What a run takes, from a config and the model's `config.json` alone."""

from luthier.estimate.run import estimate, lines

__all__ = ["estimate", "lines"]

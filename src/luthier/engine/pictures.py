"""Whether documents with pictures can share a row, tried on the model itself."""

from __future__ import annotations

from luthier.engine.network import Network
from luthier.hf.vision.seeing import pictures_apart
from luthier.hf.vision.sight import Sight


def picture_fault(network: Network, sight: Sight) -> str:
    """Why documents with pictures cannot stand in one microbatch, as a clause; empty where they can.

    Args:
        network: ready to run.
        sight: reads pictures for it.
    """
    if network.mesh is not None:
        return "on several ranks rows with images are run one by one"
    return pictures_apart(network.model, sight)

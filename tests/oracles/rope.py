"""Options of tiny models whose rotary frequencies depend on how long a text is."""

from __future__ import annotations

from typing import Any

LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * n for n in range(8)],
        "long_factor": [3.0 + n for n in range(8)],
        "original_max_position_embeddings": 16,
    },
}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}

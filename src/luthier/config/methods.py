"""How a run trains: `method: dpo`, or `method: {name: dpo, beta: 0.1}`. One model for each recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from luthier.config.sections import Section


class SftConfig(Section):
    """Supervised fine-tuning: weighted cross-entropy of what each row says."""

    name: Literal["sft"] = "sft"


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    return {"name": "sft", **value} if isinstance(value, dict) else value


MethodConfig = Annotated[SftConfig, BeforeValidator(_named)]

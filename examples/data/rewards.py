"""Rewards of examples/grpo.yaml: each gives a number for every answer."""

from typing import Any


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the number and the end of the line, else 0; `answer` is a column of the rows."""
    return [
        float(completion.endswith("\n") and completion.strip() == right)
        for completion, right in zip(completions, answer, strict=True)
    ]


def short(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Less for longer answers."""
    return [-float(len(ids)) for ids in completion_ids]

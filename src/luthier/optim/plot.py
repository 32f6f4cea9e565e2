"""A schedule as a picture: in the terminal, or as an SVG file."""

from __future__ import annotations

from collections.abc import Callable

from luthier.config.sections import ScheduleConfig
from luthier.optim.schedules import factor

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw(config: ScheduleConfig, total: int, *, peak: float = 1.0, width: int = 80, height: int = 12) -> str:
    """The learning rate over the steps as a bar chart in text.

    Args:
        config: which schedule.
        total: steps of the run.
        peak: the learning rate that a factor of 1 means.
        width: characters of the whole picture.
        height: lines of the chart.
    """
    top = max(max(factor(step, total, config) for step in _spread(min(total, 1000), total)), 1e-12)
    labels = {row: f"{top * peak * row / height:.3g}" for row in (height, (height + 1) // 2)}
    margin = max(len(label) for label in labels.values())
    width = min(width - margin - 2, total)
    values = [factor(step, total, config) for step in _spread(width, total)]
    lines = []
    for row in range(height, 0, -1):
        levels = [round(max(0.0, min(1.0, value / top * height - (row - 1))) * 8) for value in values]
        lines.append(f"{labels.get(row, ''):>{margin}} ┤" + "".join(_EIGHTHS[level] for level in levels).rstrip())
    last = str(total - 1)
    lines.append(f"{'0':>{margin}} └" + "─" * width)
    lines.append(" " * (margin + 2) + "0" + last.rjust(max(width - 1, len(last) + 1)))
    return "\n".join(lines)


def svg(config: ScheduleConfig, total: int, *, peak: float = 1.0, width: int = 640, height: int = 320) -> str:
    """The learning rate over the steps as a line in an SVG document."""
    left, bottom, right, above = 70, 40, 20, 30
    across, up = width - left - right, height - bottom - above
    steps = _spread(min(total, across), total)
    values = [factor(step, total, config) * peak for step in steps]
    top = max(max(values), 1e-12)
    x: Callable[[int], float] = lambda step: left + across * step / max(1, total - 1)  # noqa: E731
    y: Callable[[float], float] = lambda value: above + up * (1 - value / top)  # noqa: E731
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
    marks = "".join(
        f'<line x1="{left}" x2="{width - right}" y1="{y(top * part):.1f}" y2="{y(top * part):.1f}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(top * part) + 4:.1f}" text-anchor="end">{top * part:.3g}</text>'
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    ticks = "".join(
        f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>'
        for step in sorted({round((total - 1) * part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)})
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{marks}{ticks}'
        f'<text x="{left}" y="18">learning rate by step ({config.name}, {total} steps)</text>'
        f'<polyline fill="none" stroke="#1f5fbf" stroke-width="2" points="{line}"/></svg>\n'
    )


def _spread(count: int, total: int) -> list[int]:
    """`count` steps from the first to the last, evenly."""
    return [round(position * (total - 1) / max(1, count - 1)) for position in range(count)]

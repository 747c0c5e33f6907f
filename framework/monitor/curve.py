"""The loss curve as text, drawn with plotext. The only file that touches plotext, whose figure is one for the whole process."""

from __future__ import annotations

import math

WIDEST = 80
HEIGHT = 16


def _finite(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """Steps and losses of the points that can be drawn."""
    kept = {step: loss for step, loss in points.items() if math.isfinite(loss)}
    return list(kept), list(kept.values())


def step_ticks(first: int, last: int, count: int = 5) -> list[int]:
    """At most `count` whole steps from `first` to `last`, both included, evenly spread."""
    spread = {round(first + (last - first) * part / (count - 1)) for part in range(count)}
    return sorted(spread)


def curve(train: dict[int, float], held_out: dict[int, float], unit: str, width: int) -> str:
    """Lines of at most min(`width`, 80) columns: losses over steps; empty when there are fewer than two finite training losses.

    `train` and `held_out` map steps to losses in `unit`.
    """
    steps, losses = _finite(train)
    if len(steps) < 2:
        return ""
    import plotext  # loads a compiled library: only who draws pays

    plotext.terminal.limit(width=False, height=False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(width, WIDEST), HEIGHT)
    figure.draw(figure.signal(steps, losses, marker="braille").lines(True))
    held_steps, held_losses = _finite(held_out)
    if held_steps:
        figure.draw(figure.signal(held_steps, held_losses, marker="o"))
    ticks = step_ticks(steps[0], steps[-1])
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    figure.label("step", "x")
    figure.title(f"loss in {unit}: line train" + (", o held out" if held_steps else ""))
    text = figure.build().string(True)
    figure.clear()
    return "\n".join(line.rstrip() for line in text.splitlines())

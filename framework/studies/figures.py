"""The figures of a report, from the plain data of story.py. Only this file knows plotly.

Runs come as a sequence: the one that is reported, and perhaps a second one. Colours are legible on light and on dark.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from framework.monitor.page import number
from framework.studies.story import Curve, Event, Story, curve, split

COLOURS = ("#2f74d0", "#d9760f")
"""Of this run and of the other."""
PART_COLOURS = {
    "forward": "#6fa3e0", "backward": "#3566a8", "recompute": "#a9c8ee", "optimizer": "#5aa271", "communication": "#e08b3f",
    "data": "#d3b64a", "checkpoint": "#b0608f", "other": "#9aa1a9",
}  # fmt: skip
ASIDE_COLOURS = ("#6cbcbc", "#d3a3c0", "#c3b59a", "#b5bcc4")
MARKS = {
    "alert": ("triangle-up", "▲", "#d03b3b"), "not finite": ("x", "✖", "#d03b3b"), "rollback": ("triangle-left", "◀", "#8b5cc7"),
    "restart": ("square", "■", "#8b5cc7"), "resume": ("triangle-right", "▶", "#2f9e6e"), "signal": ("star", "★", "#c7921a"),
    "checkpoint": ("circle", "●", "#8a929b"),
}  # fmt: skip
"""Kind of event -> its mark for plotly, the same mark as a character, its colour."""
OTHER_MARK = ("diamond", "◆", "#8a929b")
LINE, POINT, AREA = "━", "◇", "■"
MOST_MARKS = 200
"""Of one kind; the newest are drawn."""
MOST_POINTS = 80
"""Held-out losses that get a point each; more would hide the line."""
RISE = 0.04
"""Marks of several kinds at one step stand above one another, this share of the curve's height apart."""
TALLEST = 3.0
"""Times are shown up to this many median steps; the first step and evaluations would flatten the others."""


class Key(NamedTuple):
    """An entry of a figure's legend: the place of its trace, its mark, the mark's colour, its name. The page draws it, and wraps it."""

    trace: int
    glyph: str
    colour: str
    name: str


def keys(drawn: go.Figure) -> list[Key]:
    """The legend of a figure; none where there is nothing to tell apart."""
    traces = [(at, trace) for at, trace in enumerate(drawn.to_plotly_json()["data"]) if "meta" in trace]
    found = [Key(at, one["meta"], one.get("fillcolor") or one["marker"]["color"], html.unescape(one["name"])) for at, one in traces]
    return found if len(found) > 1 else []


def figure(y: str, x: str = "step", height: int = 340) -> go.Figure:
    """An empty one with the titles of its axes; the page adds colours of text and grid."""
    layout = {
        "template": "none", "height": height, "margin": {"l": 62, "r": 12, "t": 12, "b": 46}, "hovermode": "x unified",
        "showlegend": False,
        "xaxis": {"title": {"text": x, "standoff": 8}, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "zeroline": False},
    }  # fmt: skip
    return go.Figure(layout=layout)


def _lines(to: go.Figure, runs: Mapping[str, Story], column: str) -> None:
    """The curve of a column for each run; where steps were put together, between their lowest and highest."""
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        if not run.train.has(column):
            continue
        found = curve(run.train.steps, run.train[column])
        if not found.whole:
            to.add_trace(_band(found, colour))
        line, marker = {"color": colour, "width": 1.8}, {"color": colour}
        mode, name = "lines" if len(found.steps) > 1 else "markers", html.escape(name)
        to.add_trace(go.Scatter(x=found.steps, y=found.middle, mode=mode, name=name, meta=LINE, line=line, marker=marker))


def _band(found: Curve, colour: str) -> go.Scatter:
    there = ~np.isnan(found.middle)
    x, low, high = found.steps[there], found.least[there], found.most[there]
    fill = f"rgba({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))}, 0.18)"
    x, y = np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]])
    return go.Scatter(x=x, y=y, fill="toself", fillcolor=fill, line={"width": 0}, mode="lines", hoverinfo="skip")


def loss(runs: Mapping[str, Story], unit: str) -> go.Figure:
    """Loss and held-out loss of the runs; the events of the first run stand on its curve."""
    drawn = figure(f"loss [{unit}]", height=420)
    _lines(drawn, runs, "loss")
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        if run.held_out.has("loss"):
            found = curve(run.held_out.steps, run.held_out["loss"])
            name = f"{html.escape(name)}, held out"
            line, marker = {"color": colour, "width": 1.2, "dash": "dot"}, {"color": colour, "size": 7, "symbol": "diamond-open"}
            mode = "lines+markers" if len(found.steps) <= MOST_POINTS else "lines"
            points = go.Scatter(x=found.steps, y=found.middle, mode=mode, name=name, meta=POINT, line=line, marker=marker)
            drawn.add_trace(points)
    for trace in _events(next(iter(runs.values()))):
        drawn.add_trace(trace)
    return drawn


def _events(run: Story) -> Iterator[go.Scatter]:
    found = curve(run.train.steps, run.train["loss"])
    there = np.isfinite(found.middle)
    if not there.any():
        return
    apart = RISE * (float(np.nanmax(found.middle)) - float(np.nanmin(found.middle)))
    seen: Counter[int] = Counter()
    for kind in sorted({event.kind for event in run.events}, key=lambda kind: (kind != "checkpoint", kind)):
        events = [event for event in run.events if event.kind == kind]
        name = html.escape(kind) + (f" (newest {MOST_MARKS})" if len(events) > MOST_MARKS else "")
        events = events[-MOST_MARKS:]
        steps = [event.step for event in events]
        heights = np.interp(steps, found.steps[there], found.middle[there]) + [apart * seen[step] for step in steps]
        seen.update(set(steps))
        symbol, glyph, colour = MARKS.get(kind, OTHER_MARK)
        size = 6 if kind == "checkpoint" else 11
        yield go.Scatter(
            x=steps, y=heights, mode="markers", name=name, meta=glyph, text=[hover(event) for event in events],
            hovertemplate="%{text}<extra></extra>", marker={"symbol": symbol, "size": size, "color": colour, "line": {"width": 0}},
        )  # fmt: skip


def hover(event: Event) -> str:
    """An event as plotly shows it, in short lines; its words are escaped, since plotly reads tags in them."""
    words = f"{event.kind}, step {event.step:,}: {event.says}" + (f" Change: {event.change}" if event.change else "")
    rows = [""]
    for word in words.split():
        if len(rows[-1]) + len(word) > 60:
            rows.append("")
        rows[-1] += f" {word}" if rows[-1] else word
    return "<br>".join(map(html.escape, rows))


def learning_rate(runs: Mapping[str, Story]) -> go.Figure:
    drawn = figure("learning rate", height=280)
    _lines(drawn, runs, "lr")
    return drawn.update_yaxes(exponentformat="e", rangemode="tozero")


def gradient_norm(runs: Mapping[str, Story]) -> go.Figure:
    drawn = figure("gradient norm", height=280)
    _lines(drawn, runs, "grad_norm")
    ticks = [digit * 10.0**power for power in range(-12, 13) for digit in (1, 3)]
    return drawn.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def throughput(runs: Mapping[str, Story]) -> go.Figure:
    drawn = figure("tokens/s", height=280)
    _lines(drawn, runs, "tokens_per_s")
    return drawn.update_yaxes(rangemode="tozero")


def step_time(runs: Mapping[str, Story]) -> go.Figure:
    drawn = figure("step time [s]", height=280)
    _lines(drawn, runs, "step_time_s")
    return _cut(drawn, [run.train["step_time_s"] for run in runs.values() if run.train.has("step_time_s")])


def time_split(run: Story) -> go.Figure:
    """The parts of a step as stacked areas, what comes after a step on top."""
    drawn = figure("seconds per step")
    steps, stacks = split(run.train)
    asides = iter(ASIDE_COLOURS * (1 + len(stacks) // len(ASIDE_COLOURS)))
    for name, seconds in stacks.items():
        colour = PART_COLOURS.get(name) or next(asides)
        drawn.add_trace(
            go.Scatter(
                x=steps, y=seconds, name=html.escape(name), meta=AREA, stackgroup="time", mode="lines",
                line={"width": 0.5, "color": colour}, fillcolor=colour, hovertemplate="%{y:.3g} s",
            )
        )  # fmt: skip
    return _cut(drawn, [np.sum([*stacks.values()], axis=0)])


def _cut(drawn: go.Figure, times: Sequence[np.ndarray]) -> go.Figure:
    """Show from 0 to the longest of `times` [s], but not beyond TALLEST medians; a double click shows the rest."""
    highest = max(min(float(np.nanmax(each)), TALLEST * float(np.nanmedian(each))) for each in times)
    return drawn.update_yaxes(range=[0, 1.05 * highest]) if highest > 0 else drawn


def memory(books: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Bytes of the Ledger's books, as predicted and as measured, in MiB."""
    drawn = figure("", x="MiB", height=90 + 46 * len(books)).update_layout(hovermode="closest", bargap=0.3)
    for what, colour in (("measured", COLOURS[0]), ("predicted", "#9aa1a9")):
        mib = [math.nan if book.get(what) is None else book[what] / 2**20 for book in books.values()]
        text = ["" if math.isnan(value) else number(value) for value in mib]
        names = [html.escape(name) for name in books]
        drawn.add_trace(
            go.Bar(
                y=names, x=mib, name=what, meta=AREA, orientation="h", marker={"color": colour}, hovertext=text,
                hovertemplate="%{hovertext} MiB",
            )
        )  # fmt: skip
    return drawn.update_yaxes(autorange="reversed", automargin=True, title=None).update_layout(margin={"l": 8})


def drawn_figures(runs: Mapping[str, Story], unit: str) -> dict[str, go.Figure]:
    """Name -> figure, of those that have something to show."""
    first = next(iter(runs.values()))
    makers: dict[str, Callable[[Mapping[str, Story]], go.Figure]] = {
        "loss": lambda runs: loss(runs, unit), "lr": learning_rate, "grad_norm": gradient_norm, "tokens_per_s": throughput,
        "step_time_s": step_time,
    }  # fmt: skip
    found = {column: make(runs) for column, make in makers.items() if any(run.train.has(column) for run in runs.values())}
    if first.train.named("part "):
        found["split"] = time_split(first)
    books = (first.facts.get("memory") or {}).get("books") or {}
    return {**found, "memory": memory(books)} if books else found

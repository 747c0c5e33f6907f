"""A run as one page of HTML, alone or beside a second run: what is on it, in which order and in which words. No torch.

What is read: story.py. What two runs are compared by: contrast.py. Figures: figures.py. Looks: sheet.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from plotly.offline import get_plotlyjs

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.config import parameters
from framework.config.schema import Config
from framework.monitor.page import MemoryRow, number, short, size
from framework.studies import contrast, sheet
from framework.studies.figures import drawn_figures, keys
from framework.studies.story import PARTS, Columns, Event, Story, brief, read_story

MOST_ROWS = 100
"""Of events of one kind, the newest; a long run has thousands of checkpoints."""
SETTLED = 5
"""Rates are medians without the first one in this many steps: the first ones warm up."""


def report(config: Config) -> Path:
    """Write the page that the settings `run`, `against` and `report.out` ask for; where it lies.

    Raises ConfigError where there is no run to report, or no way to write the page.
    """
    if not config.run:
        raise ConfigError("run", "nothing", "the folder of a run", "python -m framework.report run=runs/NAME [against=runs/OTHER]")
    here = read_story(Path(config.run), "run")
    there = read_story(Path(config.against), "against") if config.against else None
    out = Path(config.report.out) if config.report.out else here.folder / "report.html"
    try:
        write_atomic(out, page(here, there).encode())
    except OSError as error:
        raise ConfigError("report.out", f"{out}: {error.strerror}", "a file that can be written", "report.out=FILE.html") from None
    return out


def page(here: Story, there: Story | None = None) -> str:
    """The whole page."""
    runs = names(here, there)
    plots = {name: sheet.plot(figure.to_json() or "", keys(figure)) for name, figure in drawn_figures(runs, unit(here)).items()}

    def plot(name: str) -> str:
        return plots.get(name, "")

    body = [
        *head(runs),
        "" if there is None else compared(here, there),
        sheet.section("Loss", plot("loss"), empty(here)),
        sheet.section("Learning rate and gradient norm", sheet.pair(plot("lr"), plot("grad_norm"))),
        sheet.section("Speed", sheet.pair(plot("tokens_per_s"), plot("step_time_s"))),
        time_section(runs, plot("split")),
        memory_section(here, plot("memory")),
        events_section(here.events),
        operators_section(here.operators),
        sheet.section("Environment", sheet.table(("what", "value"), [*contrast.environment(here.facts).items()], wide=(1,))),
        settings_section(here),
    ]
    return sheet.page(" against ".join(runs), body, get_plotlyjs())


def names(here: Story, there: Story | None) -> dict[str, Story]:
    """What each run is called on the page: its name; its folder where both have the same name."""
    if there is None:
        return {here.name: here}
    if here.name != there.name:
        return {here.name: here, there.name: there}
    return {str(here.folder): here, (str(there.folder) if there.folder != here.folder else f"{there.folder} (again)"): there}


def unit(run: Story) -> str:
    """What a loss counts."""
    return "nats/byte" if run.settings.config.data.text == "bytes" else "nats/token"


def empty(run: Story) -> str:
    return "" if len(run.train.steps) else sheet.paragraph("This run has not written a step yet.", "soft")


# ---------------------------------------------------------------- head


def head(runs: Mapping[str, Story]) -> Iterable[str]:
    """Name, state and the figures that one asks for first; beside them those of a second run."""
    here, *rest = runs.values()
    for kind, (name, run) in zip(("here", "there"), runs.items(), strict=False):
        tag = "h1" if kind == "here" else "p"
        before = "" if kind == "here" else "against "
        colour = f' class="{kind}"' if len(runs) > 1 else ""
        yield f"<{tag}>{before}<span{colour}>{sheet.text(name)}</span></{tag}>"
        yield sheet.paragraph(f"{run.folder} · {standing(run.facts)}", "soft")
    others = {each.label: each.value for run in rest for each in headline(run)}
    tiles = [sheet.tile(each.label, each.value, others.get(each.label, "-") if rest else None, each.note) for each in headline(here)]
    yield f'<div class="tiles">{"".join(tiles)}</div>'


def standing(facts: Mapping[str, Any]) -> str:
    """How a run stands and when it ran, in words."""
    status, starts = facts.get("status"), facts.get("starts") or []
    if not status:
        return "not started yet"
    words = [f"{status} (or killed: nothing says that it has ended)" if status == "running" else str(status)]
    if starts:
        words.append(f"began {moment(starts[0].get('time'))}")
        if starts[-1].get("ended"):
            words.append(f"ended {moment(starts[-1]['ended'])}")
        words.append("1 start" if len(starts) == 1 else f"{len(starts)} starts")
    return " · ".join(words)


def moment(iso: str | None) -> str:
    try:
        return datetime.fromisoformat(str(iso)).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return "at an unknown time"


class Quantity(NamedTuple):
    """A figure of a run: its name, its value in words, and a word below it."""

    label: str
    value: str
    note: str = ""


def headline(run: Story) -> list[Quantity]:
    """What one asks for first; what is not known is left out."""
    found = []
    if ranks := (run.facts.get("world") or {}).get("size"):
        found.append(Quantity("ranks", str(ranks)))
    if not any(key.startswith("model") for key in run.settings.unknown):
        found.append(Quantity("parameters", short(parameters.count(run.settings.config.model))))
    if len(run.train.steps):
        steps = run.facts.get("steps") or run.settings.config.steps
        found += [Quantity("steps", f"{run.train.steps[-1]:,}", f"of {steps:,}"), *_losses("loss", run.train), *_pace(run.train)]
    return [*found, *_losses("held-out loss", run.held_out)]


def _losses(label: str, columns: Columns) -> Iterator[Quantity]:
    """The last one, and the lowest that is finite."""
    losses = columns["loss"]
    if len(losses):
        yield Quantity(f"last {label}", number(losses[-1]), f"step {columns.steps[-1]:,}")
    if columns.has("loss"):
        at = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
        yield Quantity(f"best {label}", number(losses[at]), f"step {columns.steps[at]:,}")


def _pace(train: Columns) -> Iterator[Quantity]:
    """Speed, times and memory; speed without the first steps."""
    settled = slice(len(train.steps) // SETTLED, None)
    if train.has("tokens_per_s"):
        yield Quantity("tokens/s", short(float(np.nanmedian(train["tokens_per_s"][settled]))), "median")
    if np.isfinite(train["mfu"][settled]).any():
        yield Quantity("MFU", f"{np.nanmedian(train['mfu'][settled]):.1%}", "median")
    if train.has("step_time_s"):
        half, slow = np.nanpercentile(train["step_time_s"], [50, 99])
        yield Quantity("step time, P50", brief(half))
        yield Quantity("step time, P99", brief(slow))
    if train.has("memory_bytes"):
        yield Quantity("peak memory", size(float(np.nanmax(train["memory_bytes"]))), "of a rank")


# ---------------------------------------------------------------- sections


def compared(here: Story, there: Story) -> str:
    """Where the losses part, and every setting and fact that differs."""
    rows = [*contrast.setting_differences(here.settings, there.settings), *contrast.environment_differences(here, there)]
    cells = [(row.key, row.tag, row.here, row.there) for row in rows]
    same = "" if rows else sheet.paragraph("Settings and environment are the same.", "soft")
    says = sheet.paragraph(contrast.parting(here.train, there.train).says, "says")
    return sheet.section("What differs", says, same, sheet.table(("key", "tag", "here", "there"), cells, wide=(2, 3)))


def time_section(runs: Mapping[str, Story], plot: str) -> str:
    """The split of a step over time, and what each part comes to over the whole run."""
    here, *rest = runs.values()
    if not here.train.named("part "):
        return ""
    ours, theirs = shares(here.train), shares(rest[0].train) if rest else {}
    columns = ["part", "seconds in all", "seconds of a step", "share"]
    rows = [[name, brief(total), f"{each:.4f}", f"{share:.1%}"] for name, (total, each, share) in ours.items()]
    if rest:
        columns.append("share, there")
        rows = [[*row, f"{theirs[row[0]][2]:.1%}" if row[0] in theirs else "-"] for row in rows]
    note = "Of the first rank; communication is what computation does not hide. Higher steps than the axis shows: double-click the figure."
    hidden = ""
    if here.train.has("hidden_s"):
        total = brief(float(np.nansum(here.train["hidden_s"])))
        hidden = sheet.paragraph(f"Communication beside the computation: {total} in all.", "soft")
    table = sheet.table(columns, rows, numbers=range(1, 5))
    return sheet.section("Where the time goes", plot, sheet.paragraph(note, "soft"), hidden, table)


def shares(train: Columns) -> dict[str, tuple[float, float, float]]:
    """Part -> seconds in all, seconds of an average step that has the parts, share of all time; what comes after steps too."""
    parts, asides = train.named("part "), train.named("aside ")
    order = sorted(parts, key=lambda name: PARTS.index(name) if name in PARTS else len(PARTS))
    totals = {name: float(np.nansum(train[f"part {name}"])) for name in order}
    totals |= {f"{name}, between steps": float(np.nansum(train[f"aside {name}"])) for name in asides}
    whole = sum(totals.values()) or 1.0
    steps = max((int(np.isfinite(train[f"part {name}"]).sum()) for name in parts), default=0) or 1
    return {name: (total, total / steps, total / whole) for name, total in totals.items()}


def memory_section(run: Story, plot: str) -> str:
    """The Ledger: what was predicted, what was measured."""
    ledger = run.facts.get("memory") or {}
    rows = [MemoryRow(name, book.get("predicted") or 0, book.get("measured")) for name, book in (ledger.get("books") or {}).items()]
    cells = [[row.book, size(row.predicted), "-" if row.measured is None else size(row.measured), error_words(row)] for row in rows]
    if not cells:
        return ""
    peak = (ledger.get("machine") or {}).get("allocated_peak")
    if ledger.get("peak_predicted"):
        row = MemoryRow("peak", ledger["peak_predicted"], peak)
        cells.append([row.book, size(row.predicted), "-" if peak is None else size(peak), error_words(row)])
    note = f"Rank {ledger.get('rank')}, step {ledger.get('step')}; a dash: this machine cannot say."
    table = sheet.table(("book", "predicted", "measured", "error"), cells, numbers=(1, 2, 3))
    return sheet.section("Memory", plot, sheet.paragraph(note, "soft"), table)


def error_words(row: MemoryRow) -> str:
    return "" if row.error is None else "exact" if row.error == 0 else f"{row.error:+.1%}"


def events_section(events: Sequence[Event]) -> str:
    """What happened, in the order of the steps; checkpoints, of which there are many, folded away below."""
    saves = [event for event in events if event.kind == "checkpoint"]
    others = [event for event in events if event.kind != "checkpoint"]
    title = f"{len(saves):,} checkpoint{'s' * (len(saves) != 1)}"
    return sheet.section("Events", *events_table(others), sheet.folded(title, "".join(events_table(saves))) if saves else "")


def events_table(events: Sequence[Event]) -> Iterator[str]:
    """Of a kind the newest MOST_ROWS, and how many that leaves out."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    for kind, group in by_kind.items():
        if len(group) > MOST_ROWS:
            yield sheet.paragraph(f"Of {len(group):,} events '{kind}' the newest {MOST_ROWS}.", "soft")
    shown = sorted((event for group in by_kind.values() for event in group[-MOST_ROWS:]), key=lambda event: event.step)
    columns = ("step", "event", "what", "change") if any(event.change for event in shown) else ("step", "event", "what")
    rows = [(f"{event.step:,}", event.kind, event.says, event.change)[: len(columns)] for event in shown]
    yield sheet.table(columns, rows, numbers=(0,), wide=(2, 3))


def operators_section(operators: Sequence[Mapping[str, Any]]) -> str:
    """The operators that the profiler found to cost most."""
    rows = []
    for each in operators:
        share, self_s = each.get("share"), each.get("self_s")
        times = "-" if self_s is None else f"{1000 * self_s:,.3f}", "-" if share is None else f"{share:.1%}"
        rows.append((each.get("name", ""), each.get("shapes", ""), each.get("calls", "-"), *times))
    body = sheet.table(("operator", "shapes", "calls", "self time [ms]", "share"), rows, numbers=(2, 3, 4), wide=(1,))
    return sheet.section("Operators", body)


def settings_section(run: Story) -> str:
    """config.yaml as it is, and what of it this version does not know."""
    unknown = run.settings.unknown
    words = f"Not known to this version of the framework, so left aside: {', '.join(unknown)}." if unknown else ""
    note = sheet.paragraph(words, "soft") if words else ""
    return sheet.section("Settings", note, sheet.folded("config.yaml", sheet.listing(run.settings.text)))

"""What people see while a run goes on, in two looks: a live bar on a terminal, plain aligned lines elsewhere.

Only rank 0 makes one. It writes to the given rich Console and starts no thread: the live bar is redrawn by the training loop
itself, at most four times a second.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console as Screen
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from framework.config.schema import Config
from framework.monitor import page
from framework.monitor.alerts import Alert
from framework.monitor.curve import curve
from framework.monitor.meters import EvalRecord, Meter, TrainRecord
from framework.monitor.sinks import loss_history

REDRAW_S = 0.25
ROWS_PER_TITLE = 25
STATUS_STYLE = {"done": "bold green", "stopped": "bold yellow", "failed": "bold red"}


class PlainLines:
    """One aligned line every `monitor.every` steps, and for the first and the last step."""

    def __init__(self, config: Config, screen: Screen) -> None:
        self._every, self._screen = config.monitor.every, screen
        self._table = page.columns(config, screen.width)
        self._rows = 0

    def begin(self) -> None:
        """Nothing to set up: the titles come with the first line."""

    def train(self, now: page.Moment) -> bool:
        """Write the line of this step if it is due; answers whether it was."""
        step = now.record.step
        if self._rows and step % self._every and step != now.steps:
            return False
        if self._rows % ROWS_PER_TITLE == 0:
            write(self._screen, page.table_line(self._table, None), "bold")
        write(self._screen, page.table_line(self._table, now))
        self._rows += 1
        return True

    def end(self) -> None:
        """Nothing to take away."""


class LiveBar:
    """Titles, numbers and a progress bar at the foot of the terminal, redrawn in place."""

    def __init__(self, config: Config, screen: Screen) -> None:
        self._config, self._screen = config, screen
        self._live = Live(console=screen, auto_refresh=False, transient=True)
        self._began = self._drawn = 0.0

    def begin(self) -> None:
        """Take hold of the last lines of the terminal."""
        self._began = time.monotonic()
        self._live.start()

    def train(self, now: page.Moment) -> bool:
        """Redraw if the last time is long enough ago; answers whether it was."""
        if time.monotonic() - self._drawn < REDRAW_S and now.record.step != now.steps:
            return False
        self._live.update(self._picture(now), refresh=True)
        self._drawn = time.monotonic()
        return True

    def end(self) -> None:
        """Give the lines back to the terminal."""
        self._live.stop()

    def _picture(self, now: page.Moment) -> Group:
        """Three lines no wider than the terminal, which may have been resized since the last time."""
        table = page.columns(self._config, self._screen.width)
        titles, numbers = page.table_line(table, None), page.table_line(table, now)
        share = f"{100 * now.record.step // now.steps}%  {page.span(time.monotonic() - self._began)}"
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.width = min(len(titles), self._screen.width)
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(ProgressBar(total=now.steps, completed=now.record.step), share)
        return Group(Text(titles, style="dim", no_wrap=True), Text(numbers, style="bold", no_wrap=True), bar)


class Console:
    """A Sink for people: `begin`, then records, then `close`.

    `metrics` is the run's metrics.jsonl: the curve and the best held-out loss at the end cover all starts of the run.
    """

    def __init__(self, config: Config, facts: page.Facts, screen: Screen, metrics: Path) -> None:
        self._config, self._facts, self._screen, self._metrics = config, facts, screen, metrics
        self._meter = Meter()
        self._last: page.Moment | None = None
        self._skipped = 0
        self._started = time.monotonic()
        look = config.monitor.console
        if look == "auto":
            look = "rich" if screen.is_terminal and not screen.is_dumb_terminal else "plain"
        screen.quiet = look == "none"
        self._steps = LiveBar(config, screen) if look == "rich" else PlainLines(config, screen)

    def begin(self) -> None:
        """Show what is about to happen."""
        write(self._screen, self._config.name, "bold")
        self._rows(page.head(self._config, self._facts))
        write(self._screen, "")
        self._steps.begin()

    def train(self, record: TrainRecord) -> None:
        self._meter.add(record.step_time_s, record.tokens)
        self._last = page.Moment(record, self._config.steps, self._meter)
        self._skipped += record.skipped
        if self._steps.train(self._last) and self._skipped:
            write(self._screen, page.skip_line(self._skipped, record.loss_scale), "yellow")
            self._skipped = 0

    def evaluation(self, record: EvalRecord) -> None:
        table = page.columns(self._config, self._screen.width)
        write(self._screen, page.eval_line(table, record, self._config.steps), "cyan")

    def alert(self, step: int, alert: Alert, actions: list[str]) -> None:
        done = "" if not actions else f"  ({', '.join(actions)})"
        for text in (f"alert  {alert.says}{done}", f"       change {alert.change}"):
            for line in textwrap.wrap(text, self._screen.width, subsequent_indent=" " * 7, drop_whitespace=False):
                write(self._screen, line, "yellow")

    def table(self, lines: Sequence[str]) -> None:
        """Show a table between two empty lines; its first line is the title."""
        for index, line in enumerate(["", *lines, ""]):
            write(self._screen, line, "bold" if index == 1 else "")

    def passage(self, title: str, text: str) -> None:
        """Show a piece of text, such as what the model writes. Control characters in it are made harmless."""
        harmless = "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
        write(self._screen, f"\n{title}", "bold")
        self._screen.print(Text(writable(self._screen, harmless)))

    def close(self, status: str) -> None:
        """Take the bar away, draw the curve and say how it went."""
        self._steps.end()
        unit = page.unit_of(self._config)
        train, held_out = loss_history(self._metrics)
        if self._config.monitor.curve and status != "failed":
            write(self._screen, "\n" + curve(train, held_out, f"nats per {unit}", self._screen.width))
        write(self._screen, f"\n{status}", STATUS_STYLE[status])
        self._rows(page.foot(self._last, held_out, unit, time.monotonic() - self._started, self._config.run_dir))

    def _rows(self, rows: list[page.Row]) -> None:
        for line in page.lay_out(rows, self._screen.width):
            text = Text(writable(self._screen, line))
            text.stylize("cyan", 0, page.INDENT + page.LABEL)
            self._screen.print(text, no_wrap=True, overflow="ellipsis")


def writable(screen: Screen, text: str) -> str:
    """`text` in what the screen's encoding can carry: a log file in ASCII must not end a training run."""
    return text.encode(screen.encoding, "replace").decode(screen.encoding)


def write(screen: Screen, line: str, style: str = "") -> None:
    """One line (or a drawing of several), cut at the width rather than wrapped."""
    screen.print(Text(writable(screen, line), style=style), no_wrap=True, overflow="ellipsis")

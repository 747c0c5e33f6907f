"""How a preparation goes, and what came of it, for people: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from framework.data.preparing import Prepared, Progress

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""
WIDTH = 140
FATES = {
    "empty": "left out",
    "bad_utf8": {"replace": "kept, with U+FFFD in place of what is not UTF-8", "skip": "left out"},
    "over_long": {"skip": "left out", "split": "made into several"},
    "duplicates": "left out",
}
"""What is done to documents that are not taken as they are; by the setting of that name where there is one."""


class Pace:
    """Rate and time left of a start, from what it hears."""

    def __init__(self, look: str, console: Console) -> None:
        """`look` is monitor.console: auto, rich, plain or none."""
        if look == "auto":
            look = "rich" if console.is_terminal and not console.is_dumb_terminal else "plain"
        self._console, self._look = console, look
        self._began = self._said = time.monotonic()
        self._first: int | None = None
        self._bar = Bar(TextColumn("{task.percentage:>3.0f} %"), BarColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("", total=None)

    @contextmanager
    def shown(self) -> Iterator[Pace]:
        """The bar stands inside the block. Begin it after the last fork: a bar is a thread."""
        yield self
        if self._look == "rich":
            self._bar.stop()

    def tell(self, progress: Progress) -> None:
        """Show it: always on a bar, now and then as a line."""
        now = time.monotonic()
        if self._first is None:
            self._first = progress.done  # what an earlier start has done took this one no time
        if self._look == "rich":
            self._bar.start()
            self._bar.update(self._task, completed=progress.done, total=progress.total, description=self.words(progress, now))
        elif self._look == "plain" and now - self._said >= LINE_S:
            self._said = now
            share = progress.done / max(1, progress.total)
            self._console.print(f"{share:4.0%}  {self.words(progress, now)}", highlight=False, soft_wrap=True)

    def words(self, progress: Progress, now: float) -> str:
        """Rate, documents, time left."""
        seconds = max(1e-9, now - self._began)
        done = progress.done - (self._first or 0)
        left = f"{clock((progress.total - progress.done) * seconds / done)} left" if done > 0 else ""
        return f"{progress.nbytes / seconds / 1e6:.1f} MB/s  {progress.documents:,} documents  {left}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary(prepared: Prepared) -> str:
    """What was made, and by file what was not taken as it was."""
    manifest, totals = prepared.manifest, prepared.manifest["totals"]
    tokenizer, settings = manifest["tokenizer"], manifest["settings"]
    end = "no token ends a document" if tokenizer["end_of_document"] is None else f"token {tokenizer['end_of_document']} ends each"
    lines = [
        f"{prepared.path}: {'done before, ' if prepared.again else ''}{totals['documents']:,} documents, {totals['tokens']:,} tokens of "
        f"{totals['bytes']:,} bytes ({end}); vocabulary {tokenizer['vocab_size']:,}, {manifest['dtype']}"
    ]
    lines += [f"  {count:,} {what}: {fate(what, settings)}" for what, count in faults(totals)]
    for file in manifest["files"]:
        if said := ", ".join(f"{count:,} {what}" for what, count in faults(file)):
            lines.append(f"    {file['path']}: {said}")
    lines.append(f"  to train on it: data=tokens data.files=[{prepared.path}] model.vocab_size={tokenizer['vocab_size']}")
    return "\n".join(lines)


def faults(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """What there is of each fault."""
    return [(name, counts[name]) for name in FATES if counts[name]]


def fate(fault: str, settings: Mapping[str, Any]) -> str:
    """What was done to the documents that have it, in words."""
    known = FATES[fault]
    return known if isinstance(known, str) else known[settings[fault]]

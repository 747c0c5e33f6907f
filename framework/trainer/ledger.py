"""The Ledger of a run: what was predicted and what is measured in the second step of each start, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from framework.config.schema import Config
from framework.engine.books import Fullest
from framework.engine.pipelined import PipelinedEngine
from framework.engine.state import module_of
from framework.monitor.memory import SavedActivations, machine
from framework.monitor.page import MemoryRow
from framework.monitor.runfile import End
from framework.planner import memory
from framework.planner.ledger import BOOKS, STATIC, Ledger
from framework.topology.grid import Grid
from framework.topology.groups import Groups
from framework.trainer.run import Quiet, Run, Turn
from framework.trainer.sizing import kernels_of

WARM = 1
"""Steps of a start before the one that is looked at: optimizers make their moments in the first."""

ASIDE = ("logits", "cast")
"""Parts of what the forward pass keeps that are no activations of their own: they belong to `logits` and to `gathered`."""


@dataclass(frozen=True)
class Page:
    """One rank's Ledger, predicted and measured: what stands in run.json under `memory`."""

    rank: int
    step: int
    rows: list[MemoryRow]
    peak: int
    kept: dict[str, int]
    machine: dict[str, int]

    @property
    def worst(self) -> float:
        """The largest error of a measured book, as a share of it."""
        return max((abs(row.error) for row in self.rows if row.error is not None), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        rows = {row.book: {"predicted": row.predicted, "measured": row.measured} for row in self.rows}
        facts = {"rank": self.rank, "step": self.step, "books": rows, "peak_predicted": self.peak}
        return {**facts, "kept_by": self.kept, "machine": self.machine, "worst_error": self.worst}


class LedgerHook(Quiet):
    """Looks at one step of a start on every rank; `show` gets, on the first, the page of the rank that holds the most."""

    def __init__(self, groups: Groups, grid: Grid, show: Callable[[Page], None] | None) -> None:
        self.groups, self.grid, self.show = groups, grid, show
        self.turns = 0
        self.static: Fullest | None = None
        self.saved: SavedActivations | None = None

    def after_step(self, run: Run, turn: Turn) -> None:
        self.turns += 1
        if self.turns == WARM and not turn.last:
            self.static = Fullest(run.engine)
            self.static.begin()
            if run.config.compile == "none":  # a compiled block keeps what its compiler has chosen, and says nothing
                self.saved = SavedActivations(module_of(run.engine))
                self.saved.begin()
        elif self.static is not None:
            self._release()
            with run.clock.aside("ledger"):
                self._tell(run, turn)
            self.static = self.saved = None

    def end(self, run: Run, status: End) -> None:
        self._release()

    def _release(self) -> None:
        if self.static is not None:
            self.static.end()
        if self.saved is not None:
            self.saved.end()

    def _tell(self, run: Run, turn: Turn) -> None:
        assert self.static is not None
        paper = predicted(run.engine.config, run, self.groups, self.grid)
        kept = {} if self.saved is None else self.saved.kept
        found = {book: self.static.most.get(book, 0) for book in STATIC}
        if kept:
            found["activations"] = sum(nbytes for part, nbytes in kept.items() if part not in ASIDE)
        if kept and run.config.precision.autocast and run.config.zero.stage < 3:
            found["gathered"] = kept.get("cast", 0)
        rows = [MemoryRow(book, paper.rows().get(book, 0), found.get(book)) for book in BOOKS if book in paper.rows() or found.get(book)]
        page = Page(self.groups.rank, turn.step, rows, paper.peak, kept, machine(run.engine.device))
        fullest = max(self.groups.gather(page), key=lambda page: page.peak)
        if self.show is not None:
            self.show(fullest)


def predicted(config: Config, run: Run, groups: Groups, grid: Grid) -> Ledger:
    """This rank's Ledger on paper, with what `auto` settings became."""
    kernels = kernels_of(run.engine.device)
    bounds = run.engine.bounds if isinstance(run.engine, PipelinedEngine) else None
    place = groups.place
    return memory.predict(config, grid, place.pipeline, place.data * grid.context + place.context, kernels, bounds)

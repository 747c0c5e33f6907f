"""The Ledger on paper: what each book of a rank will hold, from the config alone. Pure arithmetic, no torch."""

from __future__ import annotations

from framework.config.schema import Config
from framework.planner.ledger import Ledger
from framework.topology.grid import Grid


def predict(config: Config, grid: Grid, stage: int = 0) -> Ledger:
    """The Ledger of the ranks of pipeline stage `stage` (the fullest of them, where padding makes a difference)."""
    raise NotImplementedError


def fullest(config: Config, grid: Grid) -> Ledger:
    """The Ledger of the stage that holds the most on its device."""
    return max((predict(config, grid, stage) for stage in range(grid.pipeline)), key=lambda ledger: ledger.total)

"""What to write instead where memory has run out: the cheapest changes with which a run fits. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from framework.config.check import accepted
from framework.config.schema import Config
from framework.planner import memory, sizing
from framework.planner.activations import CPU, Kernels
from framework.planner.advice import savers, written
from framework.topology.grid import Grid

COUNT = 3


@dataclass(frozen=True)
class Remedy:
    """Words of a command line, bytes that the fullest rank's device has less by them, and whether that is enough."""

    write: str
    saves: int
    fits: bool


def cheapest(config: Config, grid: Grid, ranks_per_host: int, room: float, kernels: Kernels) -> list[Remedy]:
    """The first COUNT changes in the order of their cost after which the peak is at most `room` bytes; if there are fewer, those that
    save the most after them. On the ranks of `grid`: what needs others is left out."""
    now = memory.fullest(config, grid, kernels).peak
    found = []
    for changed in _changes(config, grid, room, kernels):
        parallel = changed.parallel
        if not accepted(changed, grid.size, ranks_per_host):
            continue
        there = Grid(parallel.pipeline, grid.size // parallel.model_ranks, parallel.context, parallel.tensor)
        peak = memory.fullest(changed, there, kernels).peak
        if peak < now:
            found.append(Remedy(written(config, changed), now - peak, peak <= room))
    enough = [remedy for remedy in found if remedy.fits]
    rest = sorted((remedy for remedy in found if not remedy.fits), key=lambda remedy: -remedy.saves)
    return [*enough, *rest][:COUNT]


def _changes(config: Config, grid: Grid, room: float, kernels: Kernels) -> Iterator[Config]:
    """A smaller micro-batch first: it changes no number of the run and costs the least."""
    smaller = [size for size in sizing.candidates(config, grid) if size < config.batch.micro]
    if smaller:
        fitting = sizing.largest(config, grid, room, kernels) or smaller[-1]
        yield sizing.with_micro(config, min(fitting, smaller[0]))
    host = kernels == CPU  # whose memory is the host's already: offload frees nothing there
    yield from (changed for _, changed in savers(config) if not (host and changed.zero.offload != config.zero.offload))

"""Out of memory: which book of the Ledger was too large and by how much, and what to write instead, in the place of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from framework.base.errors import MemoryShort
from framework.config.schema import Config
from framework.engine.books import books
from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.monitor.page import size
from framework.planner import memory, remedies
from framework.planner.ledger import STATIC, Ledger
from framework.topology.grid import Grid
from framework.topology.groups import Groups
from framework.trainer import sizing

SIGNS = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc")
"""What torch, its libraries and the system say."""


class Shortage:
    """What a rank knows of its memory. `config` has a number for the micro-batch; `sized` says that it was `auto`."""

    def __init__(self, config: Config, groups: Groups, grid: Grid, device: torch.device, ranks_per_host: int) -> None:
        """Raises ConfigError, on every rank, if micro_size=auto finds nothing that fits."""
        self.sized = config.batch.micro_size == "auto"
        self.config = sizing.resolve(config, groups, grid, device, ranks_per_host)
        self.groups, self.grid, self.device, self.ranks_per_host = groups, grid, device, ranks_per_host
        self.room = sizing.room(config, device, ranks_per_host)
        self.engine: DeepSpeedEngine | PlainEngine | None = None

    def hold(self, engine: DeepSpeedEngine | PlainEngine) -> None:
        """Hold the engine that was built, and this process from here on, to limits.memory_gib."""
        self.engine = engine
        sizing.limit(self.config, self.device, sum(books(engine).values()))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises MemoryShort in the place of what torch or the system raise where memory runs out."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_shortage(error):
                raise
            raise self._letter() from error

    def _letter(self) -> MemoryShort:
        live = {} if self.engine is None else books(self.engine)
        config = self.config if self.engine is None else self.engine.config
        kernels, place = sizing.kernels_of(self.device), self.groups.place
        paper = memory.predict(config, self.grid, place.pipeline, place.data * self.grid.context + place.context, kernels)
        book = blamed(paper, live)
        over = f" too large by {size(paper.peak - self.room)}" if paper.peak > self.room else ""
        there = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in live.items() if name in STATIC) or "nothing"
        got = f"{book}{over}: {size(paper.device[book])} of a predicted peak of {size(paper.peak)}, beside {there} so far"
        found = remedies.cheapest(config, self.grid, self.ranks_per_host, self.room, kernels)
        write = "\n            ".join(f"{each.write}  (saves {size(each.saves)}{'' if each.fits else ', not enough'})" for each in found)
        return MemoryShort(f"memory of rank {self.groups.rank}", got, f"at most {size(self.room)}", write)


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that memory has run out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(error) for sign in SIGNS)


def blamed(paper: Ledger, live: dict[str, int]) -> str:
    """The book of the device of which the most was still to come."""
    return max(paper.device, key=lambda book: paper.device[book] - live.get(book, 0))

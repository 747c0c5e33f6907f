"""What the loop and its hooks work with: a run, its position, one finished turn, and what a hook is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from framework.config.schema import Config
from framework.data.pack import MicroBatch
from framework.engine.engine import PlainEngine, StepOut
from framework.engine.sharded import DeepSpeedEngine
from framework.monitor.runfile import End
from framework.topology.random import Streams
from framework.topology.timers import Timers
from framework.trainer.feed import Feed

STOP = "stop"
"""The vote of a rank that was asked to stop."""


@dataclass
class Position:
    """How far a run has come."""

    step: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class Split:
    """Where a step's time went on this rank, in seconds: `parts` (topology/timers.py) add up to the step; `hidden_s` is
    communication beside the computation; `aside_s` what was done since the step before and counts for none: name -> seconds."""

    parts: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0
    aside_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One finished turn of the loop, as hooks see it."""

    step: int
    batch: Sequence[MicroBatch]
    out: StepOut
    tokens: int
    step_time_s: float
    data_wait_s: float
    votes: Mapping[str, float]
    last: bool
    split: Split = Split()


class Clock:
    """Seconds between finished steps, without what is measured apart (evaluation, saving). `tell` hears of each: step, aside."""

    def __init__(self, timers: Timers, hidden: Callable[[], float] = lambda: 0.0) -> None:
        """`timers` are the engine's; `hidden` gives the seconds of hidden communication since it was last asked."""
        self.tell: Callable[[str], None] = lambda phase: None
        self.timers, self._hidden = timers, hidden
        self._aside: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self) -> tuple[float, Split]:
        """Seconds since the last lap, and where they went."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        split = Split(self.timers.take(), self._hidden(), self._aside)
        self._aside = {}
        self.tell("step")
        return seconds, split

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """What happens inside does not count for a step, but for `what`."""
        began = time.perf_counter()
        with self.timers.aside():
            self.tell("aside")
            yield
            self.tell("step")
        seconds = time.perf_counter() - began
        self._aside[what] = self._aside.get(what, 0.0) + seconds
        self._since += seconds


class Hook(Protocol):
    """Something that watches the loop. It may read everything and change nothing that a step depends on."""

    def start(self, run: Run) -> None:
        """Called once, before the first step."""
        ...

    def after_step(self, run: Run, turn: Turn) -> None:
        """Called after each step, on every rank."""
        ...

    def stop(self, run: Run) -> None:
        """Called instead of the next step, on every rank, where the run was asked to stop."""
        ...

    def end(self, run: Run, status: End) -> None:
        """Called once, however the loop ended; status as in run.json."""
        ...


class Quiet:
    """A hook that does nothing at any moment; the others say what they do instead."""

    def start(self, run: Run) -> None: ...

    def after_step(self, run: Run, turn: Turn) -> None: ...

    def stop(self, run: Run) -> None: ...

    def end(self, run: Run, status: End) -> None: ...


@dataclass
class Run:
    """Everything that the loop and its hooks work with; made by build.py."""

    config: Config
    folder: Path
    engine: DeepSpeedEngine | PlainEngine
    feed: Feed
    position: Position
    streams: Streams
    clock: Clock
    hooks: list[Hook] = field(default_factory=list)
    explained: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside the block a lack of memory becomes a letter."""

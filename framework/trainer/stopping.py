"""The hook that stops a run: on a signal, at its time limit, or when its launcher has died; all ranks after the same step.

A signal says so to one rank, at any moment. The rank votes in the agreement that the next step needs anyway (trainer/feed.py), so all
ranks see it before the same step. An evaluation agrees for each batch. Nothing is done in the handler, and a second signal
changes nothing: a run that was asked to stop stops.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from framework.launch.environment import age_s
from framework.launch.parents import Launchers
from framework.monitor.runfile import End
from framework.topology.groups import Groups
from framework.trainer.run import STOP, Quiet, Run

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What schedulers, people and batch systems send."""


class Stopping(Quiet):
    """One on every rank; the first in the list of hooks, so that handlers are there before anything that can be lost."""

    def __init__(self, groups: Groups, wall_time: float | None, event: Callable[[dict[str, Any]], None]) -> None:
        """`wall_time` is in seconds from the start of this process; `event` writes to events.jsonl on the first rank."""
        self.groups, self.event = groups, event
        self.until = None if wall_time is None else time.monotonic() + wall_time - age_s()
        self.launchers = Launchers()
        self.reason: str | None = None
        self.interrupted = False
        self._before: dict[int, Any] = {}

    def start(self, run: Run) -> None:
        run.feed.votes[STOP] = lambda: float(self.asked())
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.reason is None and self.until is not None and time.monotonic() > self.until:
            self.reason = "limits.wall_time"
        if self.reason is None and self.launchers.died():
            self.reason = "the launcher has died"
        return self.reason is not None

    def unless_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """The items, as many on each rank, until any rank was asked to stop (`interrupted`). All ranks agree before each item."""
        for item in items:
            self.interrupted = self.groups.agree([float(self.asked())])[0] > 0
            if self.interrupted:
                return
            yield item

    def stop(self, run: Run) -> None:
        reasons = {rank: reason for rank, reason in enumerate(self.groups.gather(self.reason)) if reason is not None}
        self.event({"event": "signal", "step": run.position.step, "because": {str(rank): reason for rank, reason in reasons.items()}})

    def end(self, run: Run, status: End) -> None:
        """The last hook to end. A launcher kills all ranks at the first exit with a code: none leaves before all are through."""
        if status == "stopped":
            self.groups.agree([0.0])
        else:
            for number, before in self._before.items():
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name

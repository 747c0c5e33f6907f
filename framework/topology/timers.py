"""Where the time of a step goes: seconds by part, on the clock of the device that computes. Always on, so it only ever notes moments.

One line of time: each moment begins a part and ends the one before it, so parts exclude one another and add up. A part that begins
inside another one is taken out of it. On an accelerator a moment is an event in the stream that computes, and nobody waits for it
before the end of the step, which waits for the device in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from framework.topology.groups import accelerator

Part = Literal["data", "forward", "backward", "recompute", "communication", "optimizer", "checkpoint", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
"""data            waiting for the next batch
forward         the forward pass
backward        the backward pass
recompute       activations computed again inside the backward pass
communication   waiting for other ranks while nothing is computed here: exposed communication, a pipeline's bubble, slower ranks
optimizer       clipping and the update
checkpoint      waiting, inside the step, for a copy of the state
other           everything between these: hooks, logging, Python
"""


class Timers:
    """The seconds of each part since the last `take`; one for each rank."""

    def __init__(self, moment: Callable[[], Any] = time.perf_counter, between: Callable[[Any, Any], float] | None = None) -> None:
        """`moment` notes a moment, `between` gives the seconds between two of them; without it they are seconds themselves."""
        self._moment, self._between = moment, between
        self._seconds: dict[str, float] = {}
        self._noted: list[tuple[str, Any, Any]] = []
        self._part, self._since, self._held = "other", moment(), False

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What happens inside is `name`, but for the parts that begin in there."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.leave(before)

    def enter(self, name: str) -> str:
        """Begin a part; returns the one that it interrupts, for `leave`."""
        before = self._part
        if not self._held:
            self._close(name)
        return before

    def leave(self, before: str) -> None:
        """Go on with the part that was interrupted."""
        if not self._held:
            self._close(before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no part of a step."""
        self._close(self._part)
        self._held = True
        try:
            yield
        finally:
            self._since, self._held = self._moment(), False

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last time. On an accelerator its work has to be done by now."""
        self._close(self._part)
        for part, began, ended in self._noted:
            assert self._between is not None
            self._seconds[part] = self._seconds.get(part, 0.0) + self._between(began, ended)
        taken = {part: self._seconds.get(part, 0.0) for part in PARTS}
        self._noted, self._seconds = [], {}
        return taken

    def _close(self, following: str) -> None:
        now = self._moment()
        if self._between is None:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + (now - self._since)
        else:
            self._noted.append((self._part, self._since, now))
        self._part, self._since = following, now


def timers_for(device: torch.device) -> Timers:
    """Timers on the clock of `device`; of a CPU that is this process's own."""
    if device.type == "cpu":
        return Timers()
    stream = accelerator().default_stream(device)
    return Timers(lambda: event(stream), seconds_between)


def event(stream: Any = None) -> Any:
    """A moment of an accelerator's stream; None: of the current one."""
    made = accelerator().Event(enable_timing=True)
    made.record() if stream is None else made.record(stream)
    return made


def seconds_between(began: Any, ended: Any) -> float:
    """From one event to another, once the device has come so far."""
    ended.synchronize()
    return began.elapsed_time(ended) / 1000

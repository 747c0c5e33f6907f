"""Watching every collective of this process, whoever calls it: how long the computation waits, and what goes on beside it.

torch's functions, DeepSpeed's and ours all end in the methods of one class, ProcessGroup, and wait with one other, Work. Those are
exchanged while a run watches: the only place that sees traffic which DeepSpeed starts from its hooks in the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from framework.topology.timers import Timers, event, seconds_between

COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier", "gather", "scatter", "send", "recv",
    "recv_anysource", "allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
)  # fmt: skip


class Traffic:
    """Notes into `timers`, as the part communication, the time in which this process waits; counts what is hidden beside that."""

    def __init__(self, timers: Timers, device: torch.device) -> None:
        self.timers = timers
        cpu = device.type == "cpu"
        self._stamp: Callable[[], Any] = time.perf_counter if cpu else event
        self._seconds: Callable[[Any, Any], float] = (lambda began, ended: ended - began) if cpu else seconds_between
        self._since = self._stamp()
        self._methods: dict[tuple[type, str], Any] = {}
        self._open: list[list[Any]] = []  # of begun collectives that nobody waits for at once: when begun, and when done
        self._untold: dict[int, tuple[Any, list[Any]]] = {}  # those of them that will not say when they are done
        self._waits: list[tuple[Any, Any]] = []

    def watch(self) -> None:
        """From now on, until `end`."""
        if not dist.is_available():
            return
        group, work = dist.ProcessGroup, dist.Work
        for name in COLLECTIVES:
            if name in vars(group):
                self._exchange(group, name, self._begun)
        self._exchange(work, "wait", self._waited)

    def end(self) -> None:
        """Leave the classes as they were."""
        for (owner, name), method in self._methods.items():
            setattr(owner, name, method)
        self._methods.clear()

    def hidden(self) -> float:
        """Seconds since the last time in which communication went on while this process did something else."""
        now = self._stamp()
        spans = [self._placed(began, now if done is None else done) for began, done in self._open]
        waits = [self._placed(*wait) for wait in self._waits]
        self._open = [span for span in self._open if span[1] is None]
        for span in self._open:
            span[0] = now
        self._waits, self._since = [], now
        return covered([*spans, *waits]) - covered(waits)

    def _placed(self, began: Any, ended: Any) -> tuple[float, float]:
        return self._seconds(self._since, began), self._seconds(self._since, ended)

    def _exchange(self, owner: type, name: str, watched: Callable[..., Any]) -> None:
        method = self._methods[owner, name] = vars(owner)[name]

        def call(this: Any, *given: Any, **named: Any) -> Any:
            return watched(method.__get__(this), given, named)

        setattr(owner, name, call)

    def _begun(self, method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A collective is begun. One that is waited for at once is the wait's business; of the others the end is asked for."""
        before = self.timers.enter("communication")
        try:
            work = method(*given, **named)
            if work is not None and getattr(given[-1] if given else None, "asyncOp", False):
                self._follow(work)
        finally:
            self.timers.leave(before)
        return work

    def _follow(self, work: Any) -> None:
        span = [self._stamp(), None]
        self._open.append(span)

        def done(_: Any) -> None:
            span[1] = self._stamp()  # on an accelerator torch calls this at once, with a stream that waits for the collective

        try:
            work.get_future().add_done_callback(done)
        except RuntimeError:  # gloo's scattering sum has none: it counts as under way until it is waited for
            self._untold[id(work)] = work, span

    def _waited(self, method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = self.timers.enter("communication")
        began = self._stamp() if self._open else None
        _, span = self._untold.pop(id(method.__self__), (None, None)) if self._untold else (None, None)
        try:
            return method(*given, **named)
        finally:
            if began is not None:
                self._waits.append((began, self._stamp()))
            if span is not None:
                span[1] = self._stamp()
            self.timers.leave(before)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total

"""Comparing two training commands fairly: run alternately, watched from outside by the same clock.

Both sides append one line a step to a file, and the observer notes when each line appears: nobody's own clock is trusted,
and what happens between steps is counted. Both are started, and then they take turns in the order A B B A, all processes of
the other one stopped by a signal: what else the machine does changes from minute to minute, and so falls on both alike.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.ranks import Job

POLL_S = 0.01  # against a turn of several seconds: an error below half a percent, at next to no load
WARM_UP = 5


@dataclass(frozen=True)
class Side:
    """One command. `words(folder, steps)` is the module with its arguments, writing its lines to `folder / lines`."""

    name: str
    ranks: int | None
    words: Callable[[Path, int], list[str]]
    lines: str


@dataclass(frozen=True)
class Block:
    """Seconds of one side: from the command to the first finished step of its life, and per step of one turn."""

    first_step: float
    step: float


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles, the extremes included in the sample. Needs two values."""
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


class Racer:
    """A command that was started, did its WARM_UP steps, and now runs only in its turns: between them its processes are stopped.

    `first_step`: seconds from the command to its first finished step. Use it in a `with`; leaving kills what is left.
    Raises AssertionError where the command fails or is late.
    """

    def __init__(self, side: Side, steps: int, timeout: float = 600.0) -> None:
        self._side, self._seen = side, 0
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        folder = Path(self._folder.name)
        threads = str(max(1, len(os.sched_getaffinity(0)) // (side.ranks or 1)))
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._job = Job(side.words(folder, WARM_UP + steps), side.ranks, folder, {"OMP_NUM_THREADS": threads})
        times = self._watch(WARM_UP)
        self.first_step = times[0] - self._began
        self._processes = self._job.processes()
        self._send(signal.SIGSTOP)

    def __enter__(self) -> Racer:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.end()
        self._folder.cleanup()

    def turn(self, steps: int) -> float:
        """Seconds per step of the next `steps` steps. What is begun of the step after them, 10 ms at most, is not counted."""
        began = time.monotonic()
        self._send(signal.SIGCONT)
        times = self._watch(steps)
        self._send(signal.SIGSTOP)
        return (times[-1] - began) / steps

    def finish(self) -> None:
        """Let it end, and ask how it ended."""
        self._send(signal.SIGCONT)
        done = self._job.wait(max(1.0, self._deadline - time.monotonic()))
        assert done.code == 0, f"{self._side.name} ended with {done.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    def _watch(self, steps: int) -> list[float]:
        self._seen += steps
        times = watch(Path(self._folder.name, self._side.lines), self._seen, self._job.running, self._deadline)[-steps:]
        if len(times) < steps:
            self._job.end()
            raise AssertionError(f"{self._side.name} wrote {len(times)} lines where {steps} were due\n" + self._job.output()[1][-4000:])
        return times

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # the last turn may have seen its end
                process.send_signal(number)


def watch(path: Path, count: int, running: Callable[[], bool], deadline: float) -> list[float]:
    """When each of the first `count` lines of `path` appeared (monotonic seconds); fewer if the writer ended before."""
    times: list[float] = []
    size = 0
    while len(times) < count and time.monotonic() < deadline:
        alive = running()  # asked before the look, so that the last lines of an ended writer are still seen
        if path.exists() and (now := path.stat().st_size) != size:
            size, seen = now, path.read_bytes().count(b"\n")
            times.extend([time.monotonic()] * (min(seen, count) - len(times)))
        elif not alive:
            break
        time.sleep(POLL_S)
    return times


def alternate(a: Side, b: Side, lives: int, steps: int) -> list[tuple[Block, Block]]:
    """`lives` starts of both sides, one after the other; then blocks of `steps` steps in turn, A B B A in each life.

    Both sides are alive and one of them runs, so what the machine does from minute to minute falls on both. Two pairs a life.
    """
    for side in (a, b):
        with Racer(side, 1):
            pass  # fills the caches of the disk and of the code; not counted
    pairs: list[tuple[Block, Block]] = []
    for _ in range(lives):
        with Racer(a, 2 * steps) as ours, Racer(b, 2 * steps) as floor:
            times = [racer.turn(steps) for racer in (ours, floor, floor, ours)]
            ours.finish()
            floor.finish()
        for mine, other in ((times[0], times[1]), (times[3], times[2])):
            pairs.append((Block(ours.first_step, mine), Block(floor.first_step, other)))
    return pairs


def machine() -> str:
    """The class of machine, without its name: cores, memory, vector instructions."""
    flags = set(Path("/proc/cpuinfo").read_text().split()) if Path("/proc/cpuinfo").exists() else set()
    vectors = " ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}, {vectors or 'no vector flags'}), {memory:.0f} GiB"


def heading() -> str:
    """Date, versions, machine and the load that others put on it: what a figure means nothing without."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    return f"## {now}\n\n{versions}, Python {platform.python_version()}; {machine()}; load before {os.getloadavg()[0]:.2f}\n"

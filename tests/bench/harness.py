"""Comparing two training commands fairly: run alternately, watched from outside by the same clock.

Each block is one start of one command with a few warm-up steps and then the measured ones. Both sides append one line a
step to a file, and the observer notes when each line appears: nobody's own clock is trusted, and what happens between
steps is counted. Blocks come in the order A B B A A B B A ..., so a machine that slows down with time slows both.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from tests.ranks import Job

POLL_S = 0.01  # against a block of several seconds: an error below half a percent, at next to no load
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
    """One start of one side, in seconds: from the command to the first finished step, and per step after the warm-up."""

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


def run_block(side: Side, steps: int, timeout: float = 300.0) -> Block:
    """Start `side` once for WARM_UP + `steps` steps. Raises AssertionError if it fails, or is late."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        threads = str(max(1, len(os.sched_getaffinity(0)) // (side.ranks or 1)))
        began = time.monotonic()
        with Job(side.words(Path(folder), WARM_UP + steps), side.ranks, Path(folder), {"OMP_NUM_THREADS": threads}) as job:
            times = watch(Path(folder) / side.lines, WARM_UP + steps, job.running, began + timeout)
            done = job.wait(max(1.0, began + timeout - time.monotonic()))
        assert done.code == 0, f"{side.name} ended with {done.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert len(times) == WARM_UP + steps, f"{side.name} wrote {len(times)} lines, not {WARM_UP + steps}"
    return Block(times[0] - began, (times[-1] - times[WARM_UP - 1]) / steps)


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


def alternate(a: Side, b: Side, pairs: int, steps: int) -> tuple[list[Block], list[Block]]:
    """`pairs` blocks of each side in the order A B B A A B ..., after one start of each that is not counted."""
    blocks: dict[str, list[Block]] = {"a": [], "b": []}
    for side in (a, b):
        run_block(side, 1)
    for pair in range(pairs):
        for key in "ab" if pair % 2 == 0 else "ba":
            blocks[key].append(run_block(a if key == "a" else b, steps))
    return blocks["a"], blocks["b"]


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

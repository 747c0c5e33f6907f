"""What a run under way shows to somebody outside: its steps, the signs of life of its ranks, and how its processes end. No torch."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from framework.monitor.sinks import read_lines

FEW_STEPS = 5
MEMORY = 1000
"""Steps that the P99 step time is taken from."""


@dataclass
class Sign:
    """The last sign of life of a rank. `code` is how its process ended, as os.waitstatus_to_exitcode has it; None while it lives."""

    phase: str
    pid: int
    here: bool
    at: float
    code: int | None = None


class Vitals:
    """One start of a run, from outside. `look` often: a process that has ended can be asked how only until its launcher knows."""

    def __init__(self, folder: Path, factor: float, least_s: float, patience_s: float) -> None:
        """A step may take `factor` x the P99 step time, `least_s` seconds in any case; anything else `patience_s` seconds."""
        self.folder, self.factor, self.least_s, self.patience_s = folder, factor, least_s, patience_s
        self.began = time.time()
        self.began_at = datetime.fromtimestamp(self.began, timezone.utc).isoformat(timespec="seconds")
        self.step, self.steps = 0, 0
        self.times: deque[float] = deque(maxlen=MEMORY)
        self.signs: dict[int, Sign] = {}
        self.ended: list[int] = []
        self._file, self._lines = self._metrics(), 0
        self._lines = len(self._step_lines())
        self._oom_kills = oom_kills()

    def short_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since."""
        return oom_kills() > self._oom_kills

    def look(self) -> None:
        """See what has happened since."""
        for path in (self.folder / "logs").glob("pulse_*"):
            self._read_sign(path)
        dead = []
        for rank, sign in self.signs.items():
            if sign.code is None and sign.here and (code := _end_of(sign.pid)) is not None:
                sign.code = code
                dead.append(rank)
        # Killed ones first: the others have lost a peer.
        self.ended += sorted(dead, key=lambda rank: (self.signs[rank].code or 0) >= 0)

    def read_steps(self) -> None:
        """Take in the step lines of this start."""
        now = self._metrics()
        if now == self._file:
            return
        if now[0] != self._file[0]:
            self._lines = 0  # another run's folder has been moved away
        lines = self._step_lines()
        for line in lines[self._lines :]:
            self.step, self.steps = line["step"], self.steps + 1
            self.times.append(line["step_time_s"])
        self._file, self._lines = now, len(lines)

    def limit_s(self, phase: str) -> float:
        """Seconds that a rank may stay where it is."""
        if phase != "step" or self.steps < FEW_STEPS:
            return self.patience_s
        ordered = sorted(self.times)
        return max(self.least_s, self.factor * ordered[math.ceil(0.99 * len(ordered)) - 1])

    def hang(self) -> str | None:
        """What stands still for too long; None while all is well."""
        now = time.time()
        if not self.signs:
            late = now - self.began > self.patience_s
            return f"no rank has begun within {self.patience_s:.0f} s" if late else None
        rank, sign = min(self.signs.items(), key=lambda item: item[1].at)
        limit = self.limit_s(sign.phase)
        if now - sign.at <= limit or sign.phase == "end":
            return None
        return f"a hang: rank {rank} has been in phase {sign.phase} for {now - sign.at:.0f} s, {limit:.0f} s are allowed"

    def dump_stacks(self) -> None:
        """Ask every rank of this host for its stacks; one that was stopped goes on, so that it can answer."""
        for sign in self.signs.values():
            if sign.here and sign.code is None:
                for number in (signal.SIGCONT, signal.SIGUSR2):
                    try:
                        os.kill(sign.pid, number)
                    except OSError:
                        break

    def _metrics(self) -> tuple[int, int]:
        """Which file metrics.jsonl is, and its bytes."""
        try:
            found = (self.folder / "metrics.jsonl").stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def _step_lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [line for line in (read_lines(path) if path.exists() else ()) if line["kind"] == "train"]

    def _read_sign(self, path: Path) -> None:
        try:
            at, text = path.stat().st_mtime, path.read_text()
            found = json.loads(text)
        except (OSError, ValueError):
            return  # about to be written, or moved away
        rank = int(path.name.removeprefix("pulse_"))
        if at < self.began or (rank in self.signs and self.signs[rank].code is not None):
            return
        self.signs[rank] = Sign(found["phase"], found["pid"], found["host"] == socket.gethostname(), at)


def _end_of(pid: int) -> int | None:
    """How a process has ended that its parent has not asked about yet; 1 where it has gone; None while it lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 1
    if fields[0] not in "ZX":
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def oom_kills(root: Path = Path("/")) -> int:
    """Processes that the kernel has killed for lack of memory so far: in this process's control group, or where that does not say, on
    this host. 0 where nobody says. `root` is where /proc and /sys are."""
    try:
        group = next(line.split("::")[1] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        group = "/"
    for path in (root / "sys/fs/cgroup" / group.strip("/") / "memory.events", root / "proc/vmstat"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except OSError:
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0

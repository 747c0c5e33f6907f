"""Profiling: a hook that looks at a window of steps on one rank, and writes what they were spent on to profile/ in the run folder.

It changes no number of the run. Beginning, ending and writing do not count as time of a step.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from framework.base.files import write_json
from framework.engine.books import books
from framework.monitor import operators
from framework.monitor.operators import NANO, Span
from framework.monitor.page import operator_lines
from framework.monitor.profiler import Recorded, Window
from framework.monitor.roofline import Roof
from framework.monitor.runfile import End
from framework.planner.hardware import Site
from framework.topology.groups import Groups
from framework.trainer.records import Records
from framework.trainer.run import Quiet, Run, Turn
from framework.trainer.timing import hardware

OPERATORS, KERNELS = 10, 30
"""Rows of ops.json and of kernels.json."""
EARLY = "no step of the window was finished: profile.first counts the steps of each start"
FAILED = "the run failed inside the window: what the rank has of it is in profile/"


class Told(NamedTuple):
    """What the rank that was looked at tells the first one: names of its files, and rows of ops.json."""

    files: list[str]
    rows: list[dict[str, Any]]


class Profiling(Quiet):
    """One on every rank, so that what one has seen is said by the first; only profile.rank looks."""

    def __init__(self, groups: Groups, records: Records) -> None:
        self.groups, self.records = groups, records
        self.turns = self.steps = 0
        self.state: Literal["before", "inside", "after"] = "before"
        self.window: Window | None = None
        self.spans: list[Span] = []
        self.base = 0

    def start(self, run: Run) -> None:
        hosts = self.groups.gather(socket.gethostname())
        self.ranks_per_host = hosts.count(hosts[self.groups.rank])
        if run.config.profile.first == 1:
            self._begin(run)

    def after_step(self, run: Run, turn: Turn) -> None:
        profile = run.config.profile
        self.turns += 1
        if self.state == "inside":
            now = time.time_ns()
            self.spans.append((now - int(NANO * turn.step_time_s), now))  # what comes between steps lies before its beginning
            self.steps += 1
            if self.steps == profile.steps or turn.last:
                self._finish(run, self.groups.gather)
        elif self.turns == profile.first - 1 and not turn.last:
            self._begin(run)
        elif self.state == "before" and turn.last:
            self._tell(run, Told([], []))

    def stop(self, run: Run) -> None:
        if self.state == "inside":
            self._finish(run, self.groups.gather)
        elif self.state == "before":
            self._tell(run, Told([], []))

    def end(self, run: Run, status: End) -> None:
        """After a failure the other ranks may be gone: each says what it has itself."""
        if self.state == "inside":
            self._finish(run, lambda told: [told])

    def _begin(self, run: Run) -> None:
        self.state = "inside"
        if self.groups.rank == run.config.profile.rank:
            with run.clock.aside("profile"):
                self.base = sum(books(run.engine).values())
                self.window = Window(run.engine.device, deep=run.config.profile.level == "kernels")
                self.window.begin()

    def _finish(self, run: Run, gather: Callable[[Told | None], list[Told | None]]) -> None:
        self.state = "after"
        with run.clock.aside("profile"):
            told = None
            if self.window is not None:
                self.window.end()
                told = self._write(run, self.window)
                self.window = None
            found = next(filter(None, gather(told)), Told([], []))
            self._tell(run, found)

    def _tell(self, run: Run, told: Told) -> None:
        self.state = "after"
        profile = run.config.profile
        facts = {"event": "profile", "step": run.position.step, "level": profile.level, "rank": profile.rank, "steps": self.steps}
        because = {"says": EARLY} if self.steps == 0 else {} if told.files else {"says": FAILED}
        self.records.event({**facts, "files": told.files, **because})
        if told.rows:
            self.records.show(operator_lines(profile.rank, self.steps, told.rows))

    def _write(self, run: Run, window: Window) -> Told:
        """Everything that the level asks for, of the steps that were finished."""
        folder, rank = run.folder / "profile", self.groups.rank
        if not self.spans:
            return Told([], [])
        recorded = window.recorded(self.spans)
        wall_s = sum(ended - began for began, ended in self.spans) / NANO
        rows = operators.ops_rows(operators.totals(recorded.calls, by_kernel=False)[:OPERATORS], self.steps, wall_s)
        folder.mkdir(exist_ok=True)
        write_json(folder / "ops.json", rows)
        files = ["ops.json"]
        if run.config.profile.level == "kernels":
            write_json(folder / "kernels.json", self._kernels(run, recorded, wall_s))
            files += ["kernels.json", *window.write(folder, rank, self.base)]
        return Told([f"profile/{name}" for name in files], rows)

    def _kernels(self, run: Run, recorded: Recorded, wall_s: float) -> dict[str, Any]:
        roof, found = roof_of(run.engine.device, self.ranks_per_host), operators.totals(recorded.calls, by_kernel=True)
        return {
            "rank": self.groups.rank,
            "steps": self.steps,
            "wall_s": wall_s,
            "flop": sum(total.flop for total in found),
            "torch_flop": sum(total.torch_flop for total in found),
            "roofline": "no entry for this device in framework/planner/hardware.py" if roof is None else vars(roof),
            "idle": operators.gap_facts(operators.gaps(recorded.calls, self.spans), self.spans),
            "kernels": operators.kernel_rows(found[:KERNELS], roof),
        }


def roof_of(device: torch.device, ranks_per_host: int) -> Roof | None:
    """The roofline of one rank; None for an accelerator that the planner does not know."""
    here = hardware(device)
    if here is None:
        return None
    site = Site(here, ranks_per_host)
    return Roof(site.peaks, site.peak_bandwidth, here.source)

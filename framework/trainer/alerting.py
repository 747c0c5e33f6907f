"""The hook that says what goes wrong, and does about it what the settings want. One on every rank: all find the same, at the same step.

It is the one hook that may change the course of a run: it refuses a step (through the engine), rolls the run back, or ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from framework.base.errors import RunError
from framework.engine import state
from framework.monitor.alerts import Alert, Course, Edges, Told, actions, drift, look, median_load, summary
from framework.monitor.meters import peak_memory_bytes
from framework.monitor.runfile import End
from framework.monitor.sinks import JsonLines
from framework.topology.groups import Groups
from framework.trainer.records import Records
from framework.trainer.rewind import Rollback
from framework.trainer.run import Quiet, Run, Turn

WARM = 2
"""Steps of a start that compile and allocate, and are not looked at for their shares."""
EACH_STEP = ("nan", "loss_spike", "grad_spike", "skipped")
EACH_WINDOW = ("memory", "communication", "utilisation", "data_wait", "recompute", "straggler")

class Alerting(Quiet):
    """`rollback` is set where States are saved."""

    def __init__(self, groups: Groups, records: Records, memory: float, windows: Mapping[str, Any]) -> None:
        """`memory` is the bytes that this rank has; `windows` what a hook like this one remembered, if the run goes on."""
        self.groups, self.records, self.memory, self.remembered = groups, records, memory, windows
        self.rollback: Rollback | None = None
        self.edges = Edges()
        self.turns: list[tuple[float, Any]] = []
        self.warm = WARM
        self.alike = 0  # the last step after which the data ranks' weights were the same
        self.refused = False
        self.rollbacks = 0
        self.lines: JsonLines | None = None

    def start(self, run: Run) -> None:
        self.settings = run.config.alerts
        self.course = Course(self.settings, run.config)
        self.alike = run.position.step
        if self.groups.rank == 0:
            self.lines = JsonLines(run.folder / "ranks.jsonl")
        if self.remembered:
            self.course.restore(self.remembered["course"])
            self.rollbacks = self.remembered["rollbacks"]
        if "skip" in actions("loss_spike", self.settings):
            run.engine.veto = self._refuse

    def windows(self) -> dict[str, Any]:
        """What a later start goes on with, as plain data."""
        return {"course": self.course.state(), "rollbacks": self.rollbacks}

    def after_step(self, run: Run, turn: Turn) -> None:
        out = turn.out
        told = Told(turn.step, out.loss, out.grad_norm, out.loss_scale, out.skipped, self.refused)
        self.refused = False
        new = self.edges.rising(self.course.step(told), EACH_STEP)
        every = self.settings.drift_every
        if every > 0 and turn.step % every == 0:
            with run.clock.aside("drift"):
                new += self._compare(run, turn.step)
        self.warm -= 1
        if self.warm < 0:
            self.turns.append((turn.step_time_s, turn.split.parts))
        if len(self.turns) == self.settings.window:
            new += self._look(run, turn.step)
        for alert in new:
            self.records.alert(turn.step, alert, actions(alert.kind, self.settings))
        for alert in new:
            if run.position.step == turn.step:
                self._act(run, turn, alert)

    def end(self, run: Run, status: End) -> None:
        if self.lines is not None:
            self.lines.close(status)

    def _refuse(self, loss: float) -> bool:
        """The engine's question before the last backward pass of a step."""
        self.refused = self.course.spikes(loss)
        return self.refused

    def _look(self, run: Run, step: int) -> list[Alert]:
        load = median_load(self.turns, peak_memory_bytes(run.engine.device) / self.memory, utilisation(run.engine.device))
        self.turns.clear()
        loads = self.groups.gather(load)
        if self.lines is not None:
            self.lines.write({"step": step, **summary(loads)})
        return self.edges.rising(look(loads, run.config), EACH_WINDOW)

    def _compare(self, run: Run, step: int) -> list[Alert]:
        """The weights of each part of the model on all ranks that hold it."""
        place = self.groups.place
        found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
        for part, mine in self.groups.gather(((place.pipeline, place.tensor), (place.data, place.context, state.live_hash(run.engine)))):
            found.setdefault(part, []).append(mine)
        apart = drift([[hashed for _, _, hashed in sorted(found[part])] for part in sorted(found)], step)
        if apart is None:
            self.alike = step
        return self.edges.rising([] if apart is None else [apart], ["drift"])

    def _act(self, run: Run, turn: Turn, alert: Alert) -> None:
        wanted = actions(alert.kind, self.settings)
        if "rollback" in wanted and self.rollback is not None and self.rollbacks < self.settings.rollbacks:
            self.rollbacks += 1
            good = self.alike if alert.kind == "drift" else turn.step - max(1, self.course.skips)
            with run.clock.aside("rollback"):
                self.records.event({**self.rollback.to(run, good), "because": alert.kind})
            self.edges.on.clear()
            self.turns.clear()
        elif "rollback" in wanted or "stop" in wanted:
            why = f", after {self.rollbacks} rollbacks" if "rollback" in wanted else ", as alerts.actions says"
            raise RunError(f"alert {alert.kind}", alert.says + why, "a run without it", alert.change)


def utilisation(device: torch.device) -> float | None:
    """Share of the last moment in which the accelerator computed, as its driver says; None on a CPU and where it says nothing."""
    driver: Any = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(driver, "utilization"):
        return None
    try:
        return driver.utilization(device) / 100
    except (ImportError, RuntimeError):  # the package nvidia-ml-py is not there, or the driver does not answer
        return None

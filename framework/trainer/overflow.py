"""Overflow: when fp16 skips step after step, a hook that says in which module the gradients stop being finite."""

from __future__ import annotations

from framework.config.schema import Config
from framework.engine.state import module_of
from framework.monitor import gradients
from framework.monitor.gradients import GradientWatch, Seen
from framework.monitor.runfile import End
from framework.topology.groups import Groups
from framework.trainer.records import Records
from framework.trainer.run import Quiet, Run, Turn


class Overflow(Quiet):
    """One on every rank; every rank skips the same steps. Looks at one step of each row of skipped ones, and changes none."""

    def __init__(self, groups: Groups, records: Records) -> None:
        self.groups, self.records = groups, records
        self.skipped = 0
        self.looked = False
        self.watch: GradientWatch | None = None

    def after_step(self, run: Run, turn: Turn) -> None:
        if self.watch is not None:
            self.watch.end()
            with run.clock.aside("gradients"):
                self._tell(turn, self.watch.seen())
            self.watch = None
        self.skipped = self.skipped + 1 if turn.out.skipped else 0
        self.looked = self.looked and turn.out.skipped
        if not self.looked and not turn.last and due(run.config, self.skipped, turn.out.loss_scale):
            self.looked = True
            stage = run.config.parallel.pipeline - 1 - self.groups.place.pipeline
            self.watch = GradientWatch(module_of(run.engine), stage)
            self.watch.begin()

    def end(self, run: Run, status: End) -> None:
        if self.watch is not None:
            self.watch.end()

    def _tell(self, turn: Turn, mine: Seen) -> None:
        seen = gradients.together(self.groups.gather(mine))
        layers = gradients.magnitudes(seen.largest, turn.out.loss_scale)
        module = None if seen.first is None else gradients.module_of(seen.first.name)
        spread = gradients.spread(layers.values())
        self.records.event({
            "event": "gradients",
            "step": turn.step,
            "module": module,
            "spread": spread,
            "layers": [{"layer": layer, "log2": value} for layer, value in layers.items()],
        })  # fmt: skip
        where = "all gradients are finite again" if module is None else f"the first gradient that is not finite is of {module}"
        beside = "" if spread is None else f"; the layers' largest ones are {spread:.1f} powers of two apart"
        self.records.show([f"gradients of step {turn.step}: {where}{beside}"])


def due(config: Config, skipped: int, loss_scale: float) -> bool:
    """Whether the next step is to be looked at, after `skipped` skipped steps in a row, the last with that loss scale.
    fp16_autocast's scaler has no floor of its own: what no longer scales is at it."""
    floor = 1.0 if config.precision.autocast else float(config.precision.min_scale)
    most = config.alerts.skipped
    return most > 0 and (skipped >= most or (skipped > 0 and loss_scale <= floor))

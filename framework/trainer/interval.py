"""When to save: every so many steps as told, or so seldom that saving costs little. Pure arithmetic."""

from __future__ import annotations

import math

COST_SHARE = 20
"""every=auto: the training between two saves lasts this many times as long as a save costs: 5 %."""
PROBES = (5, 10, 15)
"""every=auto: steps after the start that save in order to be measured. The first makes folders and fills caches; the dearer one of the
others tells: a noisy step can hide what a save costs, and then every step would be saved."""


def interval_s(cost_s: float, mtbf_hours: float | None) -> float:
    """Seconds between two saves that each cost `cost_s` seconds of training.

    Without a mean time between failures: COST_SHARE x cost. With one: sqrt(2 x cost x MTBF), which minimises the sum of
    what saving costs and what a failure loses (Young 1974, equation 1; Daly 2006 for its range).
    """
    return COST_SHARE * cost_s if mtbf_hours is None else math.sqrt(2 * cost_s * mtbf_hours * 3600)


class Interval:
    """Says at which steps to save.

    A fixed interval saves at its multiples. `auto` saves at a few early steps and then, when it has learned what they
    cost, `steps` after the last save; what it has chosen holds for the rest of the run and at resume. The first wait is
    longer by what the probes have taken in advance. `cost_s` is what a save costs, as far as the probes have told.
    """

    def __init__(self, every: int | None, chosen: int | None, mtbf_hours: float | None) -> None:
        """`every` None stands for auto; `chosen` is what an earlier start of the run has settled on."""
        self.fixed = every
        self.steps = chosen
        self.mtbf_hours = mtbf_hours
        self._first = self._last = 0
        self._saves = 0
        self._owed = 0
        self.cost_s = 0.0

    def begin(self, step: int) -> None:
        """The run starts from `step`, which is saved already, or from nothing (0)."""
        self._first = self._last = step

    def due(self, step: int) -> bool:
        """Whether step `step` is to be saved."""
        if self.fixed is not None:
            return self.fixed > 0 and step % self.fixed == 0
        if self.steps is None:
            return self._saves < len(PROBES) and step - self._first >= PROBES[self._saves]
        return step - self._last >= self.steps + self._owed

    def saved(self, step: int) -> None:
        """A save of `step` has begun."""
        self._last = step
        self._saves += 1
        self._owed = 0

    def learn(self, cost_s: float, step_s: float) -> int | None:
        """Take in what the last save cost, both in seconds; the interval in steps if it has just been chosen."""
        if self.fixed is not None or self.steps is not None or self._saves < 2:
            return None
        self.cost_s = max(self.cost_s, cost_s)
        if self._saves < len(PROBES):
            return None
        self.steps = max(1, math.ceil(interval_s(self.cost_s, self.mtbf_hours) / max(step_s, 1e-9)))
        if self.mtbf_hours is None:
            self._owed = (len(PROBES) - 1) * self.steps
        return self.steps

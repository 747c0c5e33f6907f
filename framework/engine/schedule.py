"""Learning rate by applied update: pure arithmetic.

The argument is the number of updates applied so far, not loop turns: a step that fp16 skips moves no schedule.
"""

from __future__ import annotations

import math

from framework.config.schema import Optimizer, Schedule


def rate(schedule: Schedule, optimizer: Optimizer, applied: int) -> float:
    """The learning rate of the update after `applied` updates.

    Warm-up: lr x (applied + 1) / warmup_steps, so that the first update already moves. Then from the peak to
    lr x min_ratio at total_steps, and flat from there: by half a cosine (Loshchilov & Hutter 2017, equation 5) or a line;
    wsd stays at the peak until decay_steps before the end (Hu et al. 2024, section 4); constant never falls.
    """
    if applied < schedule.warmup_steps:
        return optimizer.lr * (applied + 1) / schedule.warmup_steps
    floor = schedule.min_ratio
    if schedule.name == "constant":
        return optimizer.lr
    if schedule.name == "wsd":
        start = schedule.total_steps - schedule.decay_steps
        return optimizer.lr * (1 - (1 - floor) * _share(applied, start, schedule.total_steps))
    done = _share(applied, schedule.warmup_steps, schedule.total_steps)
    if schedule.name == "linear":
        return optimizer.lr * (1 - (1 - floor) * done)
    return optimizer.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def _share(applied: int, start: int, end: int) -> float:
    """How far `applied` has come from `start` to `end`, 0 to 1."""
    return 1.0 if applied >= end else max(0, applied - start) / max(1, end - start)

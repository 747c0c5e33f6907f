"""The rate of every update, against closed forms worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from framework.config.schema import Optimizer, Schedule
from framework.engine.schedule import rate

PEAK = 2.0
OPTIMIZER = Optimizer(lr=PEAK)
# Peak from update 20 on, the floor 0.2 = 2.0 x 0.1 from update 100 on; 40 is a quarter of the way, 60 half, 80 three quarters.
COSINE = Schedule("cosine", warmup_steps=20, total_steps=100, min_ratio=0.1)
LINEAR = replace(COSINE, name="linear")
CONSTANT = replace(COSINE, name="constant")
WSD = replace(COSINE, name="wsd", decay_steps=40)
ALL = (COSINE, LINEAR, CONSTANT, WSD)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_the_warm_up_is_a_line_that_begins_above_zero(schedule: Schedule) -> None:
    assert [rate(schedule, OPTIMIZER, k) for k in (0, 1, 9, 18, 19)] == pytest.approx([0.1, 0.2, 1.0, 1.9, 2.0], rel=1e-15)
    assert rate(schedule, OPTIMIZER, 20) == PEAK


@pytest.mark.parametrize(
    ("schedule", "applied", "expected"),
    [
        # floor + (peak - floor) x (1 + cos(pi x share)) / 2, and cos(pi / 4) = sqrt(2) / 2, cos(pi / 3) = 1 / 2
        (replace(COSINE, warmup_steps=0, total_steps=90), 30, 0.2 + 1.8 * 0.75),
        (COSINE, 40, 0.2 + 1.8 * (2 + math.sqrt(2)) / 4),
        (COSINE, 60, 1.1),
        (COSINE, 80, 0.2 + 1.8 * (2 - math.sqrt(2)) / 4),
        (LINEAR, 40, 1.55),
        (LINEAR, 60, 1.1),
        (LINEAR, 99, 0.2 + 1.8 / 80),
        (CONSTANT, 60, PEAK),
        # flat until 60, then a line of 40 updates
        (WSD, 21, PEAK),
        (WSD, 60, PEAK),
        (WSD, 61, 2.0 - 1.8 / 40),
        (WSD, 70, 1.55),
        (WSD, 80, 1.1),
        (replace(WSD, min_ratio=0.0), 99, 2.0 / 40),
    ],
)
def test_after_the_warm_up(schedule: Schedule, applied: int, expected: float) -> None:
    assert rate(schedule, OPTIMIZER, applied) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("schedule", "last"), [(COSINE, 0.2), (LINEAR, 0.2), (WSD, 0.2), (CONSTANT, PEAK)])
def test_from_total_steps_on_it_is_flat(schedule: Schedule, last: float) -> None:
    assert [rate(schedule, OPTIMIZER, k) for k in (100, 101, 10**6)] == pytest.approx([last] * 3, rel=1e-15)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_it_rises_once_and_never_jumps(schedule: Schedule) -> None:
    rates = [rate(schedule, OPTIMIZER, k) for k in range(120)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    steepest = max(PEAK / 20, 1.8 / 40)  # warm-up, or wsd's decay: the steepest lines there are
    assert max(abs(after - before) for before, after in pairwise(rates)) <= steepest * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_no_warm_up_begins_at_the_peak(schedule: Schedule) -> None:
    assert rate(replace(schedule, warmup_steps=0), OPTIMIZER, 0) == PEAK


def test_a_warm_up_as_long_as_the_run_ends_at_the_floor() -> None:
    schedule = replace(COSINE, warmup_steps=100)
    assert rate(schedule, OPTIMIZER, 99) == PEAK
    assert rate(schedule, OPTIMIZER, 100) == pytest.approx(0.2)


def test_the_rate_is_a_multiple_of_the_peak() -> None:
    for schedule in ALL:
        for applied in (0, 7, 33, 77, 150):
            half = rate(schedule, replace(OPTIMIZER, lr=PEAK / 2), applied)
            assert half == rate(schedule, OPTIMIZER, applied) / 2

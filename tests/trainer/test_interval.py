"""When to save: closed forms, and the saves of made-up runs whose costs are known."""

from __future__ import annotations

import math

import pytest

from framework.trainer.interval import Interval, interval_s


def saves(interval: Interval, start: int, steps: int, cost_s: float, step_s: float, running: int = 0) -> list[int]:
    """The steps that are saved from `start` to `steps`; a save's cost is known `running` steps after it has begun."""
    interval.begin(start)
    found, known_at = [], -1
    for step in range(start + 1, steps + 1):
        if step == known_at:
            interval.learn(cost_s, step_s)
        if interval.due(step):
            interval.saved(step)
            found.append(step)
            known_at = step + running
            if not running:
                interval.learn(cost_s, step_s)
    return found


@pytest.mark.parametrize("cost_s", [0.0, 0.25, 3.0])
def test_without_failures_saving_costs_a_twentieth(cost_s: float) -> None:
    assert interval_s(cost_s, None) == 20 * cost_s


@pytest.mark.parametrize(("cost_s", "hours"), [(0.5, 1.0), (30.0, 24.0), (2.0, 0.1)])
def test_with_failures_no_other_interval_loses_less(cost_s: float, hours: float) -> None:
    """Share of the time that is lost at an interval T: cost / T for saving, T / 2 / MTBF for what is done again."""

    def lost(seconds: float) -> float:
        return cost_s / seconds + seconds / 2 / (hours * 3600)

    best = interval_s(cost_s, hours)
    assert best == pytest.approx(math.sqrt(2 * cost_s * hours * 3600), rel=1e-12)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert lost(best) < lost(factor * best)


def test_a_fixed_interval_saves_at_its_multiples() -> None:
    assert saves(Interval(7, None, None), 0, 30, 1.0, 1.0) == [7, 14, 21, 28]
    assert saves(Interval(7, None, None), 10, 30, 1.0, 1.0) == [14, 21, 28]
    assert saves(Interval(0, None, None), 0, 30, 1.0, 1.0) == []
    assert Interval(7, None, None).learn(1.0, 1.0) is None


@pytest.mark.parametrize("running", [0, 3])
def test_auto_probes_and_then_keeps_to_what_it_has_learned(running: int) -> None:
    """A save costs 0.3 s and a step 0.2 s: 20 x 0.3 / 0.2 = 30 steps; the first wait pays for all probes."""
    interval = Interval(None, None, None)
    assert saves(interval, 0, 140, 0.3, 0.2, running) == [5, 10, 15, 105, 135]
    assert interval.steps == 30


def test_auto_rounds_up_and_never_below_one_step() -> None:
    assert saves(Interval(None, None, None), 0, 20, 0.0, 0.2) == [5, 10, 15, 18, 19, 20]
    interval = Interval(None, None, None)
    saves(interval, 0, 15, 0.1, 0.9)  # 2.2 steps
    assert interval.steps == 3


def test_auto_with_a_mean_time_between_failures() -> None:
    interval = Interval(None, None, 1.0)
    assert saves(interval, 0, 200, 2.0, 1.5) == [5, 10, 15, 95, 175]  # sqrt(2 x 2 s x 3600 s) = 120 s = 80 steps
    assert interval.steps == 80


def test_what_was_chosen_holds_at_resume() -> None:
    """The next save is that many steps after the one that was resumed from, and nothing is probed again."""
    interval = Interval(None, 30, None)
    assert saves(interval, 70, 140, 9.0, 0.1) == [100, 130]
    assert interval.learn(9.0, 0.1) is None
    assert interval.steps == 30


@pytest.mark.parametrize("start", [3, 8, 1000])
def test_auto_that_has_not_chosen_yet_probes_from_where_it_starts(start: int) -> None:
    """A run that was stopped before it had chosen, or that goes on from another run's checkpoint, has to save as well."""
    assert saves(Interval(None, None, None), start, start + 135, 0.3, 0.2) == [start + each for each in (5, 10, 15, 105, 135)]


def test_a_probe_that_was_skipped_is_made_up_for() -> None:
    """checkpoint.busy=skip: at step 10 the first probe was still being written."""
    interval = Interval(None, None, None)
    interval.begin(0)
    assert interval.due(5)
    interval.saved(5)
    assert interval.due(10)  # left out
    interval.learn(9.0, 0.1)
    assert interval.steps is None
    assert interval.due(11)
    interval.saved(11)
    assert not interval.due(12)
    assert interval.learn(0.3, 0.2) is None
    assert interval.due(15)
    interval.saved(15)
    assert interval.learn(0.3, 0.2) == 30
    assert next(step for step in range(16, 199) if interval.due(step)) == 105


@pytest.mark.parametrize("costs", [(9.0, 0.1, 0.3), (9.0, 0.3, 0.1)])
def test_the_dearer_probe_tells_and_the_first_does_not(costs: tuple[float, ...]) -> None:
    """A noisy step can hide what a save costs."""
    interval = Interval(None, None, None)
    interval.begin(0)
    for step, cost_s in zip((5, 10, 15), costs, strict=True):
        interval.saved(step)
        interval.learn(cost_s, 0.2)
    assert interval.steps == 30

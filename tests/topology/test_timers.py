"""The line of time, on a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from framework.topology.timers import PARTS, Timers


class Hands:
    """A clock: `now` is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def moment(self) -> float:
        return self.now


def test_a_part_inside_another_is_taken_out_of_it() -> None:
    hands = Hands()
    timers = Timers(hands.moment)
    hands.now = 1.0
    with timers.part("backward"):
        hands.now = 3.0
        with timers.part("communication"):
            hands.now = 7.0
        hands.now = 8.0
    hands.now = 8.5
    taken = timers.take()
    assert {part: seconds for part, seconds in taken.items() if seconds} == {"other": 1.5, "backward": 3.0, "communication": 4.0}
    assert tuple(taken) == PARTS
    assert set(timers.take().values()) == {0.0}


def test_parts_add_up_whatever_happens() -> None:
    hands, draw = Hands(), random.Random(1)
    timers = Timers(hands.moment)
    aside = 0.0
    for _ in range(50):
        begun = hands.now
        open_parts = []
        for _ in range(200):
            hands.now += draw.random()
            if open_parts and draw.random() < 0.5:
                timers.leave(open_parts.pop())
            elif draw.random() < 0.1:
                with timers.aside(), timers.part("forward"):
                    hands.now += 5.0
                    aside += 5.0
            else:
                open_parts.append(timers.enter(draw.choice(PARTS)))
        while open_parts:
            timers.leave(open_parts.pop())
        assert sum(timers.take().values()) == pytest.approx(hands.now - begun - aside)
        aside = 0.0


def test_an_error_ends_its_part() -> None:
    hands = Hands()
    timers = Timers(hands.moment)

    def fails() -> None:
        with timers.part("forward"):
            hands.now = 2.0
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fails()
    hands.now = 3.0
    assert (timers.take()["forward"], timers.take()["other"]) == (2.0, 0.0)


def test_moments_of_a_device_are_measured_at_the_end() -> None:
    """An accelerator's events are objects; how far apart they lie is asked once its work is done."""
    hands = Hands()
    asked: list[tuple[tuple[float], tuple[float]]] = []

    def between(began: tuple[float], ended: tuple[float]) -> float:
        asked.append((began, ended))
        return ended[0] - began[0]

    timers = Timers(lambda: (hands.now,), between)
    with timers.part("forward"):
        hands.now = 4.0
    hands.now = 6.0
    assert not asked
    taken = timers.take()
    assert (taken["forward"], taken["other"]) == (4.0, 2.0)

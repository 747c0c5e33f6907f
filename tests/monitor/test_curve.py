"""The drawn curve: where its points lie, and that it fits."""

from __future__ import annotations

import math

import pytest

from framework.monitor.curve import HEIGHT, WIDEST, curve, step_ticks

FALLING = {step: 6.0 - step / 20 for step in range(1, 101)}


def braille(line: str) -> list[int]:
    """Columns of `line` that hold a dot of the training curve."""
    return [column for column, letter in enumerate(line) if "\u2801" <= letter <= "\u28ff"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_it_fits_the_width_and_eighty_columns(width: int) -> None:
    lines = curve(FALLING, {50: 3.5, 100: 1.0}, "nats per byte", width).splitlines()
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= min(width, WIDEST)
    assert max(map(len, lines)) >= min(width, WIDEST) - 2


def test_a_falling_loss_falls_from_the_top_left_to_the_bottom_right() -> None:
    rows = [(row, column) for row, line in enumerate(curve(FALLING, {}, "nats per byte", 80).splitlines()) for column in braille(line)]
    top, bottom = min(rows), max(rows)
    assert bottom[0] - top[0] >= HEIGHT - 6
    assert top[1] < 10
    assert bottom[1] > 70
    means = [sum(column for at, column in rows if at == row) / sum(at == row for at, _ in rows) for row in range(top[0], bottom[0] + 1)]
    assert means == sorted(means)


def test_axes_are_labelled_with_whole_steps_and_the_unit() -> None:
    lines = curve(FALLING, {100: 1.0}, "nats per byte", 80).splitlines()
    assert lines[0].strip() == "loss in nats per byte: line train, o held out"
    assert lines[-1].strip() == "step"
    assert lines[-2].split() == ["1", "26", "50", "75", "100"]


def test_held_out_points_lie_at_their_losses() -> None:
    """On a training loss that runs from 6 to 1, a held-out 6 is on the top row and a 1 on the bottom row."""
    body = curve(FALLING, {10: 6.0, 90: 1.0}, "nats per byte", 80).splitlines()[2:-3]
    marked = [row for row, line in enumerate(body) if "o" in line]
    assert marked == [0, len(body) - 1]


def test_losses_that_cannot_be_drawn_are_left_out() -> None:
    assert curve({**FALLING, 101: math.nan, 102: math.inf}, {7: math.nan}, "x", 80) == curve(FALLING, {}, "x", 80)


@pytest.mark.parametrize("train", [{}, {1: 2.0}, {1: 2.0, 2: math.nan}])
def test_less_than_two_points_are_no_curve(train: dict[int, float]) -> None:
    assert curve(train, {}, "nats per byte", 80) == ""


def test_two_equal_losses_are_a_level_line() -> None:
    drawn = [line for line in curve({1: 2.0, 2: 2.0}, {}, "x", 80).splitlines() if braille(line)]
    assert len(drawn) == 1


@pytest.mark.parametrize(
    ("first", "last", "wanted"), [(1, 2, [1, 2]), (1, 5, [1, 2, 3, 4, 5]), (100, 500, [100, 200, 300, 400, 500]), (7, 8, [7, 8])]
)
def test_ticks_are_whole_steps(first: int, last: int, wanted: list[int]) -> None:
    assert step_ticks(first, last) == wanted

"""The bubble of recorded work, held against the formula and against diagrams made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from framework.engine.instructions import Recorder, Work, bubble, idle_share, replay


def one_f_one_b(stages: int, micros: int, speeds: Sequence[float]) -> list[list[Work]]:
    """DeepSpeed's own order, a forward pass of 1 and a backward pass of 2 times the stage's `speeds`."""
    works: list[list[Work]] = []
    for stage in range(stages):
        commands = [command for step in TrainSchedule(micros, stages, stage) for command in step]
        kinds = [type(command) for command in commands if isinstance(command, (ForwardPass, BackwardPass))]
        works.append([Work("forward", speeds[stage]) if kind is ForwardPass else Work("backward", 2 * speeds[stage]) for kind in kinds])
    return works


@pytest.mark.parametrize(("stages", "micros"), [(1, 3), (2, 4), (2, 8), (2, 16), (4, 4), (4, 1), (3, 10)])
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, micros: int) -> None:
    assert idle_share(one_f_one_b(stages, micros, [0.7] * stages)) == pytest.approx(bubble(stages, micros))


def test_the_formula() -> None:
    """Two stages, four micro-batches: of 5 slots one is idle."""
    assert bubble(2, 4) == pytest.approx(1 / 5)
    assert bubble(4, 1) == pytest.approx(3 / 4)
    assert bubble(1, 8) == 0


def test_a_slow_stage_sets_the_pace() -> None:
    """Stages of 1 + 2 and 2 + 4, three micro-batches: the second one works without a gap from 1 to 19, then the first has 2 left."""
    works = one_f_one_b(2, 3, [1.0, 2.0])
    assert replay(works) == pytest.approx(1 + 3 * 6 + 2)
    assert idle_share(works) == pytest.approx(1 - (9 + 18) / (2 * 21))


def test_what_a_recorder_adds_up() -> None:
    recorder = Recorder()
    for kind, seconds in ((ForwardPass, 1.0), (BackwardPass, 2.0), (ForwardPass, 0.5)):
        recorder._note(kind, seconds)
    assert recorder.seconds("forward") == 1.5
    assert recorder.seconds("backward") == 2.0
    assert [work.kind for work in recorder.work] == ["forward", "backward", "forward"]


def test_stages_that_wait_for_each_other_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        replay([[Work("backward", 1.0), Work("forward", 1.0)], [Work("forward", 1.0), Work("backward", 1.0)]])

"""The loop with an engine of no weights: the order of things, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from framework.base.errors import DataError
from framework.config.schema import Batch, Config
from framework.data.pack import IGNORE, MicroBatch
from framework.engine.engine import StepOut
from framework.topology.grid import Grid
from framework.topology.groups import make_groups
from framework.topology.random import Streams
from framework.topology.timers import Timers
from framework.trainer.feed import Feed
from framework.trainer.loop import train
from framework.trainer.run import Clock, Position, Run, Turn

STEPS, GLOBAL, SEQ = 4, 6, 5


class Stream:
    """Endless steps of one micro-batch whose first row has no loss; fails at a step when told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at, self.started_at, self.closed = fails_at, -1, False

    def start(self, consumed: int) -> Iterator[list[MicroBatch]]:
        self.started_at = consumed
        return self._steps()

    def _steps(self) -> Iterator[list[MicroBatch]]:
        step = 0
        while True:
            step += 1
            if step == self.fails_at:
                raise DataError("corpus.bin", "a bad token")
            ids = torch.zeros(GLOBAL, SEQ, dtype=torch.int64)
            targets = ids.clone()
            targets[0] = IGNORE
            yield [MicroBatch(ids, targets, torch.arange(GLOBAL))]

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Notes what it is asked for."""

    device = torch.device("cpu")

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def step(self, batch: list[MicroBatch], tokens: int) -> StepOut:
        self.notes.append(f"step of {tokens} tokens")
        return StepOut(1.0, 1.0, 0.1, 1.0, False, len(self.notes))


class Noting:
    """A hook that notes its calls, and fails where it is told to."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self.name, self.notes, self.fails, self.turns = name, notes, fails, cast("list[Turn]", [])

    def _note(self, what: str) -> None:
        self.notes.append(f"{self.name} {what}")
        if what == self.fails:
            raise RuntimeError(f"{self.name} fails at {what}")

    def start(self, run: Run) -> None:
        self._note("start")

    def after_step(self, run: Run, turn: Turn) -> None:
        self.turns.append(turn)
        self._note(f"after {turn.step}")

    def end(self, run: Run, status: str) -> None:
        self._note(f"end {status}")


def a_run(notes: list[str], hooks: list[Noting], fails_at: int | None = None, position: Position | None = None) -> tuple[Run, Stream]:
    stream = Stream(fails_at)
    position, timers = position or Position(), Timers()
    feed = Feed(cast("Any", stream), make_groups(Grid(), 0, 1.0), 1, position.consumed_samples, timers)
    config = Config(steps=STEPS, batch=Batch(global_size=GLOBAL))
    return Run(config, Path("nowhere"), cast("Any", FakeEngine(notes)), feed, position, Streams(torch), Clock(timers), list(hooks)), stream


def test_the_order_of_a_run() -> None:
    notes: list[str] = []
    first, second = Noting("A", notes), Noting("B", notes)
    run, stream = a_run(notes, [first, second])
    train(run)
    step = f"step of {(GLOBAL - 1) * SEQ} tokens"
    middle = [note for n in range(1, STEPS + 1) for note in (step, f"A after {n}", f"B after {n}")]
    assert notes == ["A start", "B start", *middle, "B end done", "A end done"]
    assert (run.position.step, run.position.consumed_samples, stream.closed) == (STEPS, STEPS * GLOBAL, True)
    assert [turn.last for turn in first.turns] == [False] * (STEPS - 1) + [True]
    assert [turn.tokens for turn in first.turns] == [(GLOBAL - 1) * SEQ] * STEPS


def test_a_run_goes_on_where_its_position_stands() -> None:
    hook = Noting("A", [])
    run, stream = a_run([], [hook], position=Position(2, 2 * GLOBAL))
    train(run)
    assert stream.started_at == 2 * GLOBAL
    assert [turn.step for turn in hook.turns] == [3, 4]


def test_a_run_that_is_done_makes_no_step() -> None:
    notes: list[str] = []
    run, _ = a_run(notes, [Noting("A", notes)], position=Position(STEPS, STEPS * GLOBAL))
    train(run)
    assert notes == ["A start", "A end done"]


@pytest.mark.parametrize("fails", ["start", "after 2"])
def test_every_hook_ends_when_one_fails(fails: str) -> None:
    notes: list[str] = []
    run, stream = a_run(notes, [Noting("A", notes), Noting("B", notes, fails)])
    with pytest.raises(RuntimeError, match=f"B fails at {fails}"):
        train(run)
    assert notes[-2:] == ["B end failed", "A end failed"]
    assert stream.closed


def test_every_hook_ends_when_another_ones_end_fails() -> None:
    notes: list[str] = []
    run, stream = a_run(notes, [Noting("A", notes), Noting("B", notes, "end done"), Noting("C", notes)])
    with pytest.raises(RuntimeError, match="B fails at end done"):
        train(run)
    assert [note for note in notes if "end" in note][:2] == ["C end done", "B end done"]
    assert any(note.startswith("A end") for note in notes)
    assert stream.closed


def test_bad_data_ends_the_run_with_its_letter() -> None:
    notes: list[str] = []
    run, stream = a_run(notes, [Noting("A", notes)], fails_at=3)
    with pytest.raises(DataError) as caught:
        train(run)
    assert caught.value.exit_code == 2
    assert "a bad token" in caught.value.letter()
    assert run.position.step == 2
    assert notes[-1] == "A end failed"
    assert stream.closed


def test_what_happens_aside_does_not_count() -> None:
    clock = Clock(Timers())
    clock.lap()
    time.sleep(0.02)
    with clock.aside("evaluation"):
        time.sleep(0.2)
    seconds, split = clock.lap()
    assert 0.02 <= seconds < 0.2
    assert sum(split.parts.values()) < 0.2 <= split.aside_s["evaluation"]
    assert clock.lap()[1].aside_s == {}

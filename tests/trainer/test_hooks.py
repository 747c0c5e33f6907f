"""The hooks by themselves: what they write, when they evaluate, and that they change nothing."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from framework.config.schema import Batch, Config, Data, Eval, Monitor
from framework.data.pack import MicroBatch
from framework.engine.engine import StepOut
from framework.monitor.meters import EvalRecord
from framework.topology.grid import Grid
from framework.topology.groups import make_groups
from framework.topology.timers import Timers
from framework.trainer.hooks import ClosingText, Evaluation, SampleLog
from framework.trainer.run import Clock, Run, Turn
from framework.trainer.stopping import Stopping


class Sums:
    """An engine whose evaluation finds a loss of 12 nats over 8 tokens, and whose next token is the last one's successor."""

    device = torch.device("cpu")

    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        return 12.0, 8 * len(list(batches))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((ids + 1) % 256, 256).float() * 1e4


class Kept:
    """A sink that keeps evaluations."""

    def __init__(self) -> None:
        self.records: list[EvalRecord] = []

    def evaluation(self, record: EvalRecord) -> None:
        self.records.append(record)


def a_run(config: Config) -> Run:
    return cast("Run", SimpleNamespace(config=config, engine=Sums(), clock=Clock(Timers()), folder=Path("nowhere")))


def unasked() -> Stopping:
    """Nobody asks this one to stop."""
    return Stopping(make_groups(Grid(), 0, 1.0), None, lambda event: None)


def a_turn(step: int, last: bool, batch: list[MicroBatch] | None = None) -> Turn:
    votes: dict[str, Any] = {"votes": {}} if "votes" in {field.name for field in dataclasses.fields(Turn)} else {}
    out = StepOut(1.0, 1.0, 0.1, 1.0, False, step)
    return Turn(step=step, batch=batch or [], out=out, tokens=8, step_time_s=0.1, data_wait_s=0.0, last=last, **votes)


@pytest.mark.parametrize(("every", "steps"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (9, [7])])
def test_evaluation_comes_every_so_often_and_after_the_last_step(every: int, steps: list[int]) -> None:
    sink = Kept()
    run = a_run(Config(eval=Eval(every=every)))
    hook = Evaluation(lambda: iter([cast("MicroBatch", None)]), 4, [cast("Any", sink)], unasked())
    for step in range(1, 8):
        hook.after_step(run, a_turn(step, step == 7))
    assert [record.step for record in sink.records] == steps
    assert {(record.loss, record.tokens, record.samples) for record in sink.records} == {(1.5, 8, 4)}


def test_evaluation_does_not_count_as_step_time() -> None:
    run = a_run(Config(eval=Eval(every=1)))

    def slow() -> Any:
        time.sleep(0.1)
        return iter([])

    run.clock.lap()
    Evaluation(slow, 1, [], unasked()).after_step(run, a_turn(1, False))
    assert run.clock.lap()[0] < 0.1


def test_an_evaluation_is_given_up_where_the_run_is_to_stop() -> None:
    sink, stopping, read = Kept(), unasked(), []

    def batches() -> Any:
        for number in range(5):
            read.append(number)
            stopping.reason = "SIGTERM" if number == 2 else None
            yield number

    run = a_run(Config(eval=Eval(every=1)))
    run.engine.evaluate = lambda given: (0.0, len(list(given)))  # type: ignore[method-assign]
    Evaluation(batches, 5, [cast("Any", sink)], stopping).after_step(run, a_turn(1, False))
    assert (read, sink.records) == ([0, 1, 2], [])


def micro(*indices: int) -> MicroBatch:
    nothing = torch.zeros(len(indices), 2, dtype=torch.int64)
    return MicroBatch(nothing, nothing, torch.tensor(indices))


def test_logged_samples_are_the_ones_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    hook = SampleLog(path, make_groups(Grid(), 0, 1.0))
    run = a_run(Config(batch=Batch(4, 2)))
    hook.after_step(run, a_turn(1, False, [micro(3, 1), micro(2, 0)]))
    hook.after_step(run, a_turn(2, True, [micro(7, 5), micro(4, 6)]))
    hook.end(run, "done")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "data_rank": 0, "micro": 0, "ids": [3, 1]},
        {"step": 1, "data_rank": 0, "micro": 1, "ids": [2, 0]},
        {"step": 2, "data_rank": 0, "micro": 0, "ids": [7, 5]},
        {"step": 2, "data_rank": 0, "micro": 1, "ids": [4, 6]},
    ]


def test_a_torn_last_line_is_cut_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1, "data_rank": 0, "micro": 0, "ids": [9]}\n{"step": 2, "da')
    hook = SampleLog(path, make_groups(Grid(), 0, 1.0))
    hook.after_step(a_run(Config()), a_turn(2, True, [micro(8)]))
    hook.end(a_run(Config()), "done")
    assert [json.loads(line)["ids"] for line in path.read_text().splitlines()] == [[9], [8]]


def test_the_closing_text_goes_on_from_the_prompt_after_the_last_step_only() -> None:
    """Letters whose next one is certain: A is followed by BCDEF."""
    shown: list[tuple[str, str]] = []
    console = cast("Any", SimpleNamespace(passage=lambda title, text: shown.append((title, text))))
    run = a_run(Config(data=Data(text="bytes", seq_length=4), monitor=Monitor(sample_tokens=5, sample_prompt="xA")))
    hook = ClosingText(console)
    hook.after_step(run, a_turn(1, False))
    assert shown == []
    hook.after_step(run, a_turn(2, True))
    assert [text for _, text in shown] == ["xABCDEF"]


def test_a_rank_without_a_console_computes_and_shows_nothing() -> None:
    ClosingText(None).after_step(a_run(Config(data=Data(text="bytes"), monitor=Monitor(sample_tokens=2))), a_turn(1, True))

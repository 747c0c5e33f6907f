"""What a pipeline's step spends its time on: recorded seconds of DeepSpeed's instructions, and what follows from them.

A stage that waits for another one shows it as a slow exchange, and so does a slow backend. They are told apart by playing
the recorded work again without any exchange: what a stage then has to wait is the bubble, what is left was the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from deepspeed.runtime.pipe import schedule

from framework.topology.groups import accelerator

EXCHANGES = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)
UPDATES = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

Instructions = dict[type, Callable[..., None]]


class Work(NamedTuple):
    """One forward or backward pass of one micro-batch on one stage, in seconds."""

    kind: Literal["forward", "backward"]
    seconds: float


class Recorder:
    """Seconds of one step on this rank: `work` in the order in which it was done, `exchange_s` and `update_s` as sums."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.exchange_s = self.update_s = 0.0

    def watch(self, instructions: Instructions) -> Instructions:
        """The same instructions, timed. Each waits for the device, which a step otherwise does not."""
        return {kind: self._timed(kind, run) for kind, run in instructions.items()}

    def seconds(self, kind: str) -> float:
        """Of all forward or backward passes together."""
        return sum(work.seconds for work in self.work if work.kind == kind)

    def _timed(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        def timed(engine: Any, buffer_id: int | None = None) -> None:
            accelerator().synchronize()
            began = time.perf_counter()
            run(engine) if buffer_id is None else run(engine, buffer_id)
            accelerator().synchronize()
            self._note(kind, time.perf_counter() - began)

        return timed

    def _note(self, kind: type, seconds: float) -> None:
        if kind is schedule.ForwardPass:
            self.work.append(Work("forward", seconds))
        elif kind is schedule.BackwardPass:
            self.work.append(Work("backward", seconds))
        elif kind in EXCHANGES:
            self.exchange_s += seconds
        elif kind in UPDATES:
            self.update_s += seconds


def bubble(stages: int, micros: int) -> float:
    """The share of a step in which a stage has nothing to do, where all are equally fast: (p - 1) / (m + p - 1)
    (Narayanan et al. 2021, section 2.2, as a share of the whole)."""
    return (stages - 1) / (micros + stages - 1)


def replay(stages: Sequence[Sequence[Work]]) -> float:
    """Seconds from the first to the last pass of a step, if nothing but the recorded work of each stage took any time.

    The n-th forward pass of a stage is of micro-batch n and follows that of the stage before; a backward pass follows that of
    the stage after.
    """
    ends: dict[tuple[str, int, int], float] = {}
    clocks, done = [0.0] * len(stages), [{"forward": 0, "backward": 0} for _ in stages]
    left = sum(len(works) for works in stages)
    while left:
        before = left
        for stage, works in enumerate(stages):
            while sum(done[stage].values()) < len(works):
                kind, seconds = works[sum(done[stage].values())]
                micro, neighbour = done[stage][kind], stage + (-1 if kind == "forward" else 1)
                needed = ends.get((kind, neighbour, micro)) if 0 <= neighbour < len(stages) else 0.0
                if needed is None:
                    break
                clocks[stage] = max(clocks[stage], needed) + seconds
                ends[kind, stage, micro] = clocks[stage]
                done[stage][kind] += 1
                left -= 1
        assert left < before, "the stages wait for each other"
    return max(clocks)


def idle_share(stages: Sequence[Sequence[Work]]) -> float:
    """The bubble of the recorded work: the share of all stages' time in which they wait for another stage's work."""
    busy = sum(work.seconds for works in stages for work in works)
    return 1 - busy / (len(stages) * replay(stages))

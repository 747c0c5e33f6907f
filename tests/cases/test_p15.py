"""P15 (Lightning-AI/pytorch-lightning#20806): one rank is asked to stop, and all stop: after the same step, with one checkpoint.

A signal may come to any rank, at any moment, more than once. What follows is the same each time: every rank ends with code 75,
run.json says stopped, the newest checkpoint is whole and of the last step in metrics.jsonl, and the next start goes on as if
nothing had been.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.marks import slow
from tests.ranks import Completed, Job

WORDS = [*runs.SMALL, "verify.hash_every=1", "model.dropout=0.1", "checkpoint=async", "checkpoint.every=0"]
STEPS, AT = 12, 5
DONE, STOPPED = 0, 75


def wrap(cls: type, name: str, before: Callable[[int], None]) -> None:
    """Call `before` with the number of the call, from 1, before each call of a method."""
    method, calls = getattr(cls, name), [0]

    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        calls[0] += 1
        before(calls[0])
        return method(self, *args, **named)

    setattr(cls, name, wrapped)


def send_at(cls: type, name: str, call: int, ranks: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    def send(number: int) -> None:
        if number == call and int(os.environ["RANK"]) in ranks:
            for signal_number in numbers:
                os.kill(os.getpid(), signal_number)

    wrap(cls, name, send)


def in_a_step(ranks: tuple[int, ...], *numbers: int) -> None:
    """Signals in the middle of step AT."""
    from framework.engine.sharded import DeepSpeedEngine

    send_at(DeepSpeedEngine, "step", AT, ranks, numbers)


def in_an_evaluation(ranks: tuple[int, ...], *numbers: int) -> None:
    """A signal as the second batch of the first evaluation is read; each takes a while."""
    from framework.trainer import stopping

    send_at(stopping.Stopping, "asked", AT + 1, ranks, numbers)


def in_a_save(ranks: tuple[int, ...], *numbers: int) -> None:
    """A signal as the save of step AT has begun, whose writers take a while."""
    from framework.checkpoint.writer import Writer

    send_at(Writer, "submit", 1, ranks, numbers)


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
MOMENTS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "SIGTERM to rank 1": (partial(in_a_step, (1,), TERM), []),
    "SIGINT to both": (partial(in_a_step, (0, 1), INT), []),
    "SIGUSR1 to rank 0, synchronous save": (partial(in_a_step, (0,), USR1), ["checkpoint=sync"]),
    "twice, and another one": (partial(in_a_step, (1,), TERM, TERM, INT), []),
    "during an evaluation": (partial(in_an_evaluation, (1,), TERM), [f"eval.every={AT}", "eval.samples=16"]),
    "during an asynchronous save": (partial(in_a_save, (0,), TERM), [f"checkpoint.every={AT}"]),
}


def last_step(run: Path) -> int:
    return max(runs.losses(run))


def assert_stopped(run: Path) -> int:
    """The step that it stopped after."""
    step = last_step(run)
    assert runs.facts(run)["status"] == "stopped"
    assert runs.whole_steps(run / "checkpoints")[-1] == step < STEPS
    assert runs.events(run, "signal")[-1]["step"] == step
    return step


OFTEN = ("during an evaluation",)


@pytest.mark.parametrize("moment", [moment if moment in OFTEN else slow(moment) for moment in MOMENTS])
def test_all_ranks_stop_after_the_same_step_and_go_on(moment: str, tmp_path: Path) -> None:
    prepare, more = MOMENTS[moment]
    words = [*WORDS, f"steps={STEPS}", *more]
    runs.train([*words, "name=straight"], tmp_path, ranks=2)
    said = runs.train(words, tmp_path, ranks=2, code=STOPPED, prepare=prepare)
    assert said.count("stopped after step") == 1  # one rank speaks for all
    run = tmp_path / "runs/run"
    assert assert_stopped(run) in (AT, AT + 1)
    assert not (run / "checkpoints").joinpath("step_00000012").exists()
    runs.train(words, tmp_path, ranks=2)
    assert runs.facts(run)["status"] == "done"
    assert runs.same_steps(runs.hashes(run), runs.hashes(tmp_path / "runs/straight"))
    assert runs.losses(run) == runs.losses(tmp_path / "runs/straight")


def test_the_time_limit_is_a_stop_too(tmp_path: Path) -> None:
    words = [*WORDS, "steps=100000", "schedule.total_steps=100000"]
    runs.train([*words, "limits.wall_time=4"], tmp_path, ranks=2, code=STOPPED)
    run = tmp_path / "runs/run"
    assert set(runs.events(run, "signal")[-1]["because"].values()) == {"limits.wall_time"}
    assert runs.whole_steps(run / "checkpoints")[-1] == last_step(run)


def test_without_checkpoints_it_stops_all_the_same(tmp_path: Path) -> None:
    runs.train([*WORDS, f"steps={STEPS}", "checkpoint=none"], tmp_path, ranks=2, code=STOPPED, prepare=partial(in_a_step, (1,), TERM))
    assert runs.facts(tmp_path / "runs/run")["status"] == "stopped"


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    runs.train([*WORDS, f"steps={STEPS}"], tmp_path, ranks=2, code=STOPPED, prepare=asked_at_once)
    assert runs.whole_steps(tmp_path / "runs/run/checkpoints") == []
    runs.train([*WORDS, f"steps={STEPS}"], tmp_path, ranks=2)
    assert last_step(tmp_path / "runs/run") == STEPS


def asked_at_once() -> None:
    from framework.trainer import stopping

    send_at(stopping.Stopping, "asked", 1, (0,), (TERM,))


# ---------------------------------------------------------------- under the real launcher

LONG = [*WORDS, "steps=100000", "schedule.total_steps=100000", "checkpoint.every=50"]


def process(job: Job, part: str) -> psutil.Process:
    """The process of the job whose command line holds `part`; the one with the lowest pid."""
    found = [one for one in job.processes() if part in " ".join(one.cmdline())]
    return min(found, key=lambda one: one.pid)


def ranks_of(job: Job) -> list[psutil.Process]:
    """The ranks themselves, without their loaders and writers."""
    inner = process(job, "deepspeed.launcher.launch")
    return [child for child in inner.children() if "framework.train" in " ".join(child.cmdline())]


def to_the_outer_launcher(job: Job) -> None:
    job.send(TERM)


def to_the_inner_launcher(job: Job) -> None:
    process(job, "deepspeed.launcher.launch").send_signal(TERM)


def to_rank_1(job: Job) -> None:
    ranks_of(job)[1].send_signal(TERM)


def to_all(job: Job) -> None:
    for one in job.processes():
        one.send_signal(INT)


def kill_the_outer_launcher(job: Job) -> None:
    job.send(signal.SIGKILL)


def kill_the_inner_launcher(job: Job) -> None:
    process(job, "deepspeed.launcher.launch").kill()


SENT: dict[str, tuple[Callable[[Job], None], set[int]]] = {
    "SIGTERM to the outer launcher": (to_the_outer_launcher, {143, -TERM}),
    "SIGTERM to the inner launcher": (to_the_inner_launcher, {1}),
    "SIGTERM to rank 1": (to_rank_1, {STOPPED}),
    "SIGINT to every process, as Ctrl-C": (to_all, {STOPPED, 1, 130, -INT}),
    "SIGKILL to the outer launcher": (kill_the_outer_launcher, {-signal.SIGKILL}),
    "SIGKILL to the inner launcher": (kill_the_inner_launcher, {0, STOPPED, 1}),
}
"""And the codes that the deepspeed CLI makes of it."""


def left_after(job: Job, seconds: float) -> list[psutil.Process]:
    until = time.monotonic() + seconds
    while job.processes() and time.monotonic() < until:
        time.sleep(0.1)
    return job.processes()


def steps_done(run: Path, job: Job, count: int) -> None:
    until = time.monotonic() + 120
    while len(runs.losses(run)) < count:
        assert job.running(), job.output()
        assert time.monotonic() < until, job.output()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("sent", SENT)
def test_under_the_launcher(sent: str, tmp_path: Path) -> None:
    send, codes = SENT[sent]
    run = tmp_path / "runs/run"
    with Job(["framework.train", *LONG], 2, tmp_path) as job:
        steps_done(run, job, 20)
        send(job)
        assert left_after(job, 30) == []
        ended: Completed = job.wait(5)
    assert ended.code in codes, ended.stderr
    step = last_step(run)
    assert runs.facts(run)["status"] == "stopped"
    assert runs.whole_steps(run / "checkpoints")[-1] == step
    before = runs.losses(run)
    words = [word for word in LONG if not word.startswith("steps=")]
    runs.train([*words, f"steps={step + 5}"], tmp_path, ranks=2)
    runs.train([*words, f"steps={step + 5}", "name=straight"], tmp_path, ranks=2)
    assert runs.losses(run) == runs.losses(tmp_path / "runs/straight")
    assert before.items() <= runs.losses(run).items()

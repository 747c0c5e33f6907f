"""Vitals: what counts as a hang, and how a process that its parent has not asked about has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.studies.vitals import Vitals, oom_kills


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def sign(folder: Path, rank: int, phase: str, pid: int = 1, age_s: float = 0.0, host: str | None = None) -> None:
    path = folder / "logs" / f"pulse_{rank}"
    path.write_text(json.dumps({"phase": phase, "pid": pid, "host": host or socket.gethostname()}))
    at = time.time() - age_s
    os.utime(path, (at, at))


def steps(folder: Path, times: list[float], first: int = 1) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step, seconds in enumerate(times, start=first):
            file.write(json.dumps({"kind": "train", "step": step, "step_time_s": seconds}) + "\n")


def watching(folder: Path, began_s_ago: float = 1000.0) -> Vitals:
    vitals = Vitals(folder, factor=10.0, least_s=5.0, patience_s=600.0)
    vitals.began -= began_s_ago
    return vitals


def test_the_limit_of_a_step_is_a_multiple_of_the_p99(folder: Path) -> None:
    vitals = watching(folder)
    assert vitals.limit_s("step") == 600.0  # nothing is known yet
    steps(folder, [1.0] * 98 + [2.0, 50.0])
    vitals.read_steps()
    assert vitals.step == 100
    assert vitals.limit_s("step") == 20.0  # the 99th of 100
    assert vitals.limit_s("aside") == vitals.limit_s("start") == 600.0


def test_a_short_step_still_has_its_least_time(folder: Path) -> None:
    vitals = watching(folder)
    steps(folder, [0.01] * 10)
    vitals.read_steps()
    assert vitals.limit_s("step") == 5.0


@pytest.mark.parametrize(
    ("phase", "age_s", "hangs"), [("step", 4, False), ("step", 6, True), ("aside", 6, False), ("aside", 700, True), ("end", 700, False)]
)
def test_a_hang(phase: str, age_s: float, hangs: bool, folder: Path) -> None:
    vitals = watching(folder)
    steps(folder, [0.01] * 10)
    sign(folder, 0, "step", os.getpid())
    sign(folder, 1, phase, os.getpid(), age_s)
    vitals.look()
    vitals.read_steps()
    said = vitals.hang()
    assert (said is not None) == hangs
    assert said is None or f"rank 1 has been in phase {phase}" in said


def test_ranks_that_never_begin_are_a_hang(folder: Path) -> None:
    assert watching(folder, 10).hang() is None
    assert "no rank has begun" in (watching(folder, 601).hang() or "")


def test_signs_of_an_earlier_start_do_not_count(folder: Path) -> None:
    sign(folder, 0, "step", age_s=1.0)
    vitals = Vitals(folder, 10.0, 5.0, 600.0)
    vitals.look()
    assert vitals.signs == {}


def test_steps_of_an_earlier_start_do_not_count_and_a_new_file_is_read_from_its_beginning(folder: Path) -> None:
    steps(folder, [1.0] * 8)
    vitals = watching(folder)
    vitals.read_steps()
    assert (vitals.step, vitals.steps) == (0, 0)
    steps(folder, [1.0], first=9)
    vitals.read_steps()
    assert (vitals.step, vitals.steps) == (9, 1)
    (folder / "metrics.jsonl").rename(folder / "old.jsonl")  # resume=never
    steps(folder, [1.0] * 20)
    vitals.read_steps()
    assert (vitals.step, vitals.steps) == (20, 21)


@pytest.mark.parametrize(
    ("code", "ending"), [(0, "pass"), (3, "raise SystemExit(3)"), (-signal.SIGKILL, "import os; os.kill(os.getpid(), 9)")]
)
def test_how_a_process_has_ended_is_known_before_its_parent_asks(code: int, ending: str, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ending])
    sign(folder, 0, "step", child.pid)
    vitals = watching(folder)
    until = time.monotonic() + 30
    while not vitals.ended and time.monotonic() < until:
        vitals.look()
        time.sleep(0.01)
    assert child.returncode is None  # nobody has asked yet
    assert (vitals.ended, vitals.signs[0].code) == ([0], code)
    child.wait()


def test_a_killed_rank_comes_before_those_that_have_lost_it(folder: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", end]) for end in ("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)")]
    for child in children:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for rank, child in enumerate(children):
        sign(folder, rank, "step", child.pid)
    vitals = watching(folder)
    vitals.look()
    assert vitals.ended == [1, 0]
    for child in children:
        child.wait()


def test_a_rank_of_another_host_cannot_be_looked_up(folder: Path) -> None:
    sign(folder, 0, "step", pid=2**22 + 1, host="elsewhere")
    vitals = watching(folder)
    vitals.look()
    assert vitals.ended == []


def test_kills_of_the_host_are_counted(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    assert oom_kills(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("pgfault 17\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    group = tmp_path / "sys/fs/cgroup/jobs/one"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 1\noom_kill 1\n")
    assert oom_kills(tmp_path) == 1  # the control group's own word comes first

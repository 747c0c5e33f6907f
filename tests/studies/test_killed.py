"""killed.py: the moments, seen in made-up run folders, and what a start that fails says."""

from __future__ import annotations

import io
import json
import socket
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from framework.base.errors import ConfigError, RunError, StartError
from framework.launch.tree import PORT_TRIES, port_taken
from framework.studies import killed
from framework.studies.killed import Moment, Runs, Watch
from framework.topology.groups import connect

AFTER_2 = Moment(2)


def log(folder: Path, *steps: int, step_time_s: float = 0.0) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            file.write(json.dumps({"kind": "train", "step": step, "step_time_s": step_time_s}) + "\n")


def checkpoint(folder: Path, name: str) -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)


def reached(watch: Watch, moment: Moment) -> bool:
    watch.look()
    return watch.reached(moment)


def test_the_moment_needs_a_checkpoint_and_a_step_after_it(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    log(tmp_path, 1, 2, 3)
    assert not reached(watch, AFTER_2)  # no checkpoint
    checkpoint(tmp_path, "step_00000001")
    checkpoint(tmp_path, ".tmp-step_00000002-a")
    assert not reached(watch, AFTER_2)  # none of step 2
    checkpoint(tmp_path, "step_00000003")
    assert not reached(watch, AFTER_2)  # a later one, and no step after it
    log(tmp_path, 4)
    assert reached(watch, AFTER_2)


def test_what_an_earlier_start_logged_does_not_count(tmp_path: Path) -> None:
    log(tmp_path, 1, 2, 3)
    checkpoint(tmp_path, "step_00000002")
    watch = Watch(tmp_path)
    assert not reached(watch, AFTER_2)
    log(tmp_path, 3)
    assert reached(watch, AFTER_2)


def test_saving_means_a_folder_that_this_start_has_begun(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_00000002")
    checkpoint(tmp_path, ".tmp-step_00000003-first")
    watch = Watch(tmp_path)
    log(tmp_path, 3)
    assert not reached(watch, Moment(2, saving=True))
    checkpoint(tmp_path, ".tmp-step_00000003-second")
    assert reached(watch, Moment(2, saving=True))


def test_in_a_step_means_some_time_after_the_line_of_the_last(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_00000002")
    watch = Watch(tmp_path)
    log(tmp_path, 3, step_time_s=0.5)
    assert not reached(watch, Moment(2, in_step=True))
    time.sleep(0.21)
    assert reached(watch, Moment(2, in_step=True))


# ---------------------------------------------------------------- starts


def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, patience_s: float = 60.0) -> Runs:
    """Runs of `program`, a piece of Python, in the place of a training."""
    monkeypatch.setattr(killed, "run_command", lambda words, ranks, port, module: [sys.executable, "-c", program, *words])
    return Runs((), tmp_path / "runs", 1, 4, patience_s, Console(file=io.StringIO()))


@pytest.mark.parametrize(("code", "kind"), [(1, RunError), (2, ConfigError)])
def test_a_start_that_fails_is_told_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type) -> None:
    failing = runs(tmp_path, monkeypatch, f"print('the disk is full'); raise SystemExit({code})")
    with pytest.raises(kind, match=rf"straight, start 1\n  got       exit code {code}\n      the disk is full\n"):
        failing.make("straight", ())


def test_a_start_that_ends_well_and_leaves_no_finished_run_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="a run that ended as None"):
        runs(tmp_path, monkeypatch, "pass").make("straight", ())


def test_a_run_that_is_stuck_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="nothing logged for 0 s"):
        runs(tmp_path, monkeypatch, "import time; time.sleep(60)", patience_s=0.3).make("straight", ())


def test_a_run_that_is_over_too_soon_is_tried_again_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"open({str(tmp_path / 'starts')!r}, 'a').write('x')"
    with pytest.raises(RunError, match="over before they could be killed"):
        runs(tmp_path, monkeypatch, program).make("killed", (), (Moment(2),))
    assert (tmp_path / "starts").read_text() == "x" * killed.ATTEMPTS


TAKEN = """
import sys
starts = {starts!r}
open(starts, "a").write("x")
if len(open(starts).read()) <= {times}:
    print("MASTER_PORT\\n  got       a port in use\\n  expected  a free port")
    raise SystemExit(2)
"""


@pytest.mark.parametrize(("times", "then", "starts"), [(2, "a run that ended as None", 3), (99, "a port in use", PORT_TRIES)])
def test_a_taken_port_is_another_start_of_the_same(
    times: int, then: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ends well as soon as it has its port, and is no run; a port that is never free is told."""
    program = TAKEN.format(starts=str(tmp_path / "starts"), times=times)
    with pytest.raises((RunError, ConfigError), match=then):
        runs(tmp_path, monkeypatch, program).make("straight", ())
    assert (tmp_path / "starts").read_text() == "x" * starts


def test_what_is_taken_for_it_is_what_ranks_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StartError) as met:
            connect(10.0, False)
    (tmp_path / "output").write_text(met.value.letter())
    assert port_taken(tmp_path / "output")

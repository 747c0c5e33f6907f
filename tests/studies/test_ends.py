"""Every end that a run can come to, as the README's table has it: exit code, what run.json says, what the next start does.

Each row is tried twice: ranks started by `python -m framework.train launch.num_procs=2`, and by the deepspeed CLI.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.cases.test_p15 import left_after, process, steps_done, to_the_inner_launcher
from tests.ranks import ROOT, Job
from tests.sweeps import command

LONG = 100_000
FAULTS = {"an exception in a rank": "crash", "SIGKILL of rank 1": "kill", "the disk is full": "disk"}
WORDS = {"a setting is refused": ["zero=stage9"], "limits.wall_time is over": ["limits.wall_time=30"]}


def outer(job: Job) -> psutil.Process:
    return process(job, "deepspeed.launcher.runner") if _has(job, "deepspeed.launcher.runner") else process(job, "bin/deepspeed")


def _has(job: Job, part: str) -> bool:
    return any(part in " ".join(one.cmdline()) for one in job.processes())


def ranks_of(job: Job) -> list[psutil.Process]:
    inner = process(job, "deepspeed.launcher.launch")
    return [child for child in inner.children() if "framework.train" in " ".join(child.cmdline())]


SENT: dict[str, Callable[[Job], None]] = {
    "SIGTERM to the process that you started": lambda job: job.send(signal.SIGTERM),
    "SIGTERM to DeepSpeed's outer launcher": lambda job: outer(job).terminate(),
    "SIGTERM to DeepSpeed's inner launcher": to_the_inner_launcher,
    "SIGTERM to a rank": lambda job: ranks_of(job)[1].terminate(),
    "SIGKILL of the process that you started": lambda job: job.send(signal.SIGKILL),
    "SIGKILL of DeepSpeed's outer launcher": lambda job: outer(job).kill(),
    "SIGKILL of DeepSpeed's inner launcher": lambda job: process(job, "deepspeed.launcher.launch").kill(),
}


def rows() -> dict[str, list[str]]:
    """End -> the other cells of the README's table."""
    text = (ROOT / "README.md").read_text()
    lines = text[text.index("| how a run ends |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def codes(cell: str) -> set[int]:
    """A shell says 128 + n of a process that signal n has killed, Python -n."""
    found = {int(number) for number in re.findall(r"\d+", cell)}
    return found | {128 - number for number in found if 128 < number < 160}


def test_the_table_has_a_row_for_each_end() -> None:
    assert set(rows()) == {"the last step is done", *FAULTS, *WORDS, *SENT}


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["python", "deepspeed"])
@pytest.mark.parametrize("end", rows())
def test_each_end(end: str, starter: str, tmp_path: Path) -> None:
    by_python, by_deepspeed, status, after = rows()[end]
    steps = 8 if end == "the last step is done" else LONG
    words = command(["checkpoint=sync", "checkpoint.every=5", "name=run", *WORDS.get(end, [])], tmp_path, steps)
    words += ["launch.num_procs=2"] if starter == "python" else []
    fault = {"FAULT_RANK": "1", "FAULT_STEP": "12", "FAULT_KIND": FAULTS[end]} if end in FAULTS else {}
    env = {"PYTHONPATH": f"{ROOT / 'tests/faults'}:{ROOT}", "FAULT_ONCE": str(tmp_path / "struck"), **fault}
    run = tmp_path / "runs/run"
    with Job(words, 2 if starter == "deepspeed" else None, tmp_path, env) as job:
        if end in SENT:
            steps_done(run, job, 12)
            SENT[end](job)
        ended = job.wait(60)
        assert left_after(job, 30) == []
    assert ended.code in codes(by_python if starter == "python" else by_deepspeed), ended.stdout + ended.stderr
    assert ("Traceback" in ended.stdout + ended.stderr) == (FAULTS.get(end) == "crash")  # a fault of ours, and nothing else
    assert (runs.facts(run)["status"] if run.exists() else "no folder") == status
    saved = runs.whole_steps(run / "checkpoints")
    again(run, words, starter, after, max(saved, default=0), tmp_path)


def again(run: Path, words: list[str], starter: str, after: str, saved: int, cwd: Path) -> None:
    """The same start once more, with an end in sight."""
    if after == "is refused again":
        assert not run.exists()
        return
    assert saved > 0
    starts, more = len(runs.facts(run)["starts"]), saved + 3
    words = [*words, *([] if after == "has nothing to do" else [f"steps={more}", "limits.wall_time=null"])]
    with Job(words, 2 if starter == "deepspeed" else None, cwd) as job:
        assert job.wait(90).code == 0, job.output()
    if after == "has nothing to do":
        assert len(runs.facts(run)["starts"]) == starts
        return
    assert after == "goes on"
    assert runs.facts(run)["status"] == "done"
    assert runs.events(run, "resume")[-1]["step"] == saved
    assert max(runs.losses(run)) >= more

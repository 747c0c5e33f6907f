"""run.lock: whose a run folder is, and when nobody's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import ConfigError
from framework.trainer import lock
from tests import runs
from tests.ranks import Job, launch


@pytest.fixture
def living() -> Iterator[dict[str, Any]]:
    """The words of a lock that a living process holds."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    began = int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
    yield {"host": socket.gethostname(), "pid": other.pid, "began": began}
    other.kill()
    other.wait()


def held(folder: Path, words: dict[str, Any]) -> None:
    (folder / "run.lock").write_text(json.dumps(words))


def test_it_is_taken_once_and_let_go(tmp_path: Path) -> None:
    lock.take(tmp_path)
    lock.take(tmp_path)  # the same process
    assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    lock.release(tmp_path)
    assert not (tmp_path / "run.lock").exists()
    lock.release(tmp_path)


def test_a_living_process_keeps_it(tmp_path: Path, living: dict[str, Any]) -> None:
    held(tmp_path, living)
    with pytest.raises(ConfigError, match=f"held by process {living['pid']}"):
        lock.take(tmp_path)
    lock.release(tmp_path)
    assert (tmp_path / "run.lock").exists()


def test_a_dead_one_does_not(tmp_path: Path, living: dict[str, Any]) -> None:
    held(tmp_path, {**living, "began": living["began"] - 1})  # the pid was given out again
    lock.take(tmp_path)
    held(tmp_path, {**living, "pid": 2**22 + 1})  # beyond the highest pid
    lock.take(tmp_path)
    (tmp_path / "run.lock").write_text("{")
    lock.take(tmp_path)
    held(tmp_path, living)
    os.kill(living["pid"], signal.SIGKILL)
    os.waitid(os.P_PID, living["pid"], os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not asked how
    lock.take(tmp_path)


def test_of_another_host_it_cannot_tell(tmp_path: Path, living: dict[str, Any]) -> None:
    held(tmp_path, {**living, "host": "elsewhere"})
    with pytest.raises(ConfigError) as caught:
        lock.take(tmp_path)
    assert f"rm {tmp_path / 'run.lock'}" in caught.value.write


@pytest.mark.slow
def test_two_runs_of_one_name(tmp_path: Path) -> None:
    """The second is refused while the first lives, also with resume=never, and takes over when the first was killed."""
    words = ["framework.train", *runs.SMALL, "steps=100000", "schedule.total_steps=100000", "checkpoint.every=20"]
    run = tmp_path / "runs/run"
    with Job(words, 2, tmp_path) as first:
        while len(runs.whole_steps(run / "checkpoints")) < 1:
            assert first.running()
        for word in ("resume=auto", "resume=never"):
            refused = launch([*words, word], 2, tmp_path, 120)
            assert refused.code == 2
            assert "held by process" in refused.stdout + refused.stderr
        assert first.running()
        first.end(signal.SIGKILL)
    assert (run / "run.lock").exists()
    step = runs.whole_steps(run / "checkpoints")[-1]
    again = launch([word for word in words if not word.startswith("steps=")] + [f"steps={step + 3}"], 2, tmp_path, 120)
    assert again.code == 0, again.stderr
    assert not (run / "run.lock").exists()

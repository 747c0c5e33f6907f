"""A rank's signs of life: what it is at, when it last moved, and its stacks when it is asked for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import runs
from tests.ranks import ROOT


def test_a_run_leaves_a_sign_of_each_rank(tmp_path: Path) -> None:
    runs.train([*runs.SMALL, "steps=2"], tmp_path, ranks=2)
    signs = [json.loads((tmp_path / f"runs/run/logs/pulse_{rank}").read_text()) for rank in range(2)]
    assert [sign["phase"] for sign in signs] == ["end", "end"]
    assert len({sign["pid"] for sign in signs}) == 2


STUCK = """
import ctypes, sys
from pathlib import Path
from framework.trainer.pulse import Pulse

def deep_inside():
    ctypes.PyDLL(None).sleep(60)  # holds Python's lock

pulse = Pulse(Path(sys.argv[1]), 3)
pulse.beat("step")
deep_inside()
"""


def test_stacks_come_from_a_process_that_holds_pythons_lock(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    child = subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)], cwd=ROOT)
    sign, stacks = tmp_path / "logs/pulse_3", tmp_path / "logs/stacks_3.txt"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (sign.exists() and '"step"' in sign.read_text()):
        time.sleep(0.05)
    while time.monotonic() < until and "deep_inside" not in stacks.read_text():
        os.kill(child.pid, signal.SIGUSR2)
        time.sleep(0.1)
    child.kill()
    child.wait()
    assert "deep_inside" in stacks.read_text()


def test_the_files_time_is_set_as_the_rank_moves_but_not_at_every_step(tmp_path: Path) -> None:
    from framework.trainer.pulse import BEAT_S, Pulse

    (tmp_path / "logs").mkdir()
    pulse = Pulse(tmp_path, 0)
    pulse.beat("step")
    os.utime(pulse.path, (1.0, 1.0))
    pulse.beat("step")
    assert pulse.path.stat().st_mtime == 1.0
    pulse.beaten -= BEAT_S
    pulse.beat("step")
    assert time.time() - pulse.path.stat().st_mtime < 60
    pulse.beat("aside")
    assert json.loads(pulse.path.read_text())["phase"] == "aside"

"""tree.py: what a command starts is found and killed wherever it has gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from framework.launch.tree import Tree, free_port

# A parent that leaves behind a child in a session of its own and ends.
ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
# A parent that waits, deaf to polite signals, with a forked child.
DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(60)"


def wait_for(count: int, tree: Tree) -> list[int]:
    until = time.monotonic() + 20
    while len(tree.pids()) != count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(tree.pids()) == count
    return tree.pids()


@pytest.mark.parametrize(("program", "count"), [(ORPHAN, 1), (DEAF, 2)])
def test_leaving_the_block_kills_everything(tmp_path: Path, program: str, count: int) -> None:
    with Tree([sys.executable, "-c", program], tmp_path / "output") as tree:
        if program is ORPHAN:
            tree.process.wait(20)
        pids = wait_for(count, tree)
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    assert tree.pids() == []


def test_other_processes_live_on(tmp_path: Path) -> None:
    with Tree([sys.executable, "-c", DEAF], tmp_path / "one") as one, Tree([sys.executable, "-c", DEAF], tmp_path / "two") as two:
        wait_for(2, one)
        wait_for(2, two)
        one.kill()
        assert one.code() == -signal.SIGKILL
        assert len(two.pids()) == 2


def test_code_and_output(tmp_path: Path) -> None:
    program = "import os, sys; print('said', 'RANK' in os.environ); sys.stderr.write('warned'); sys.exit(7)"
    os.environ["RANK"] = "3"
    try:
        with Tree([sys.executable, "-c", program], tmp_path / "a" / "output") as tree:
            tree.process.wait(20)
            assert tree.code() == 7
    finally:
        del os.environ["RANK"]
    text = (tmp_path / "a" / "output").read_text()
    assert "said False" in text
    assert "warned" in text


def test_a_free_port_is_free() -> None:
    assert 1024 <= free_port() < 65536

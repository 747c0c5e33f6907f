"""tests/ranks.py itself: results and failures arrive, deadlines hold, and no process is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.ranks import ROOT, Job, launch, run_ranks


def environment(rank: int, world_size: int) -> tuple[int, int, dict[str, str], int]:
    return rank, world_size, dict(os.environ), torch.get_num_threads()


def test_each_rank_has_its_place_in_the_environment() -> None:
    results = run_ranks(environment, 2, env={"COLOUR": "blue"})
    cores = len(os.sched_getaffinity(0))
    assert [(rank, world) for rank, world, _, _ in results] == [(0, 2), (1, 2)]
    for rank, (_, _, env, threads) in enumerate(results):
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (str(rank), str(rank), "2", "2")
        assert env["COLOUR"] == "blue"
        assert threads == int(env["OMP_NUM_THREADS"]) == max(1, cores // 2)
    assert results[0][2]["MASTER_PORT"] == results[1][2]["MASTER_PORT"]


def reduced(rank: int, world_size: int, share: torch.Tensor) -> torch.Tensor:
    total = share * (rank + 1)
    torch.distributed.all_reduce(total)
    return total


def test_init_makes_a_group_that_reduces() -> None:
    results = run_ranks(reduced, 3, torch.tensor([1.0, 10.0]), init=True)
    for total in results:
        assert total.tolist() == [6.0, 60.0]  # 1 + 2 + 3


def group_and_helper(rank: int, world_size: int) -> tuple[bool, bool]:
    import deepspeed

    return torch.distributed.is_initialized(), deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]


def test_without_init_there_is_no_group_and_the_compiled_helper_is_off() -> None:
    assert run_ranks(group_and_helper, 1) == [(False, False)]


def large(rank: int, world_size: int) -> torch.Tensor:
    return torch.full((300_000,), float(rank))


def test_results_larger_than_a_pipe_arrive_and_no_descriptor_is_kept() -> None:
    run_ranks(large, 2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        zeros, ones = run_ranks(large, 2)
        assert zeros.sum().item() == 0.0
        assert ones.sum().item() == 300_000.0
    assert len(os.listdir("/proc/self/fd")) == before


def note_pid(folder: str, rank: int) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))


def alive(folder: Path) -> list[int]:
    """Which of the noted processes still run (a zombie does not)."""
    pids = [int(path.read_text()) for path in folder.iterdir()]
    assert pids, "the processes never noted themselves"
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def second_fails(rank: int, world_size: int, folder: str) -> None:
    note_pid(folder, rank)
    torch.distributed.barrier()
    if rank == 1:
        raise ValueError("the second rank has had enough")
    torch.distributed.barrier()


def test_the_first_traceback_is_shown_and_the_others_end(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed first.*second_fails.*ValueError: the second rank has had enough"):
        run_ranks(second_fails, 2, str(tmp_path), init=True)
    assert time.monotonic() - began < 100  # not by the deadline of 120 s
    assert alive(tmp_path) == []


def second_vanishes(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def test_a_rank_that_ends_without_a_word_is_named_with_its_code() -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 failed first:\nthe process ended without an answer, exit code 7"):
        run_ranks(second_vanishes, 2)


def leaves(rank: int, world_size: int) -> None:
    sys.exit(0)


def test_sys_exit_is_no_result() -> None:
    with pytest.raises(AssertionError, match="SystemExit"):
        run_ranks(leaves, 1)


def waits_for_ever(rank: int, world_size: int, folder: str) -> None:
    note_pid(folder, rank)
    if rank == 0:
        time.sleep(600)


def test_the_deadline_shows_where_the_late_rank_hangs(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)no answer from rank 0 of 2.*waits_for_ever") as caught:
        run_ranks(waits_for_ever, 2, str(tmp_path), timeout=3)
    assert time.monotonic() - began >= 3
    assert "rank 1\n" not in str(caught.value)  # it had answered
    assert alive(tmp_path) == []


def starts_a_child(rank: int, world_size: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, "child").write_text(str(child.pid))


def test_children_of_a_rank_go_with_it(tmp_path: Path) -> None:
    run_ranks(starts_a_child, 1, str(tmp_path))
    until = time.monotonic() + 5  # the kill is sent; the kernel may take a moment
    while alive(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert alive(tmp_path) == []


def test_ranks_die_when_the_test_process_dies(tmp_path: Path) -> None:
    notes, scratch = tmp_path / "notes", tmp_path / "scratch"
    notes.mkdir()
    scratch.mkdir()
    script = f"from tests.ranks import run_ranks; from tests.test_ranks import hangs; run_ranks(hangs, 2, {str(notes)!r})"
    pytest_like = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)})
    try:
        until = time.monotonic() + 60
        while len(list(notes.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        pytest_like.kill()
        pytest_like.wait()
    until = time.monotonic() + 10
    while alive(notes) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(notes) == []


def hangs(rank: int, world_size: int, folder: str) -> None:
    note_pid(folder, rank)
    time.sleep(600)


PROBE = """
import os, subprocess, sys, time
# One write: the launcher starts python unbuffered, where print writes piece by piece and two ranks' pieces mix.
os.write(1, f"rank {os.environ.get('RANK')} words {sys.argv[1:]}".encode() + bytes([10]))
if "orphan" in sys.argv:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if "hang" in sys.argv:
    time.sleep(600)
if "fail" in sys.argv:
    sys.exit("no good")
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A folder from where `python -m probe` runs PROBE."""
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def test_a_command_gets_a_clean_environment_and_its_code_is_a_result(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    done = launch(["probe", "fail", "a=1"], None, probe, timeout=60)
    assert (done.code, done.stdout, done.stderr) == (1, "rank None words ['fail', 'a=1']\n", "no good\n")
    assert done.left_behind == ()
    assert 0 < done.seconds < 60


def test_a_process_left_behind_is_named_and_ended(probe: Path) -> None:
    with Job(["probe", "orphan"], None, probe) as job:
        done = job.wait(timeout=60)
        assert len(done.left_behind) == 1
        assert done.left_behind[0].endswith("sleep 600")
        assert job.processes() == []


def test_a_command_past_its_deadline_is_killed_as_a_tree_and_shows_its_stacks(probe: Path) -> None:
    with Job(["probe", "hang", "orphan"], None, probe) as job:
        with pytest.raises(AssertionError, match=r"(?s)still running after 1.*rank None.*probe.py"):
            job.wait(timeout=1)
        assert job.processes() == []


def test_a_signal_goes_to_the_command(probe: Path) -> None:
    with Job(["probe", "hang"], None, probe) as job:
        until = time.monotonic() + 30
        while not job.output()[0] and time.monotonic() < until:
            time.sleep(0.02)
        job.send(signal.SIGTERM)
        assert job.wait(timeout=30).code == -signal.SIGTERM


def test_ranks_start_the_deepspeed_launcher(probe: Path) -> None:
    done = launch(["probe", "a=1"], 2, probe, timeout=120)
    assert done.code == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} words ['--local_rank={rank}', 'a=1']" in done.stdout
    assert done.left_behind == ()

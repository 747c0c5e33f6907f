"""The writer process: what it writes, what it survives, and what is left when somebody is killed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from framework.checkpoint.errors import SaveError
from framework.checkpoint.folders import owner
from framework.checkpoint.manifest import MANIFEST
from framework.checkpoint.save import CHUNK, ORPHAN_WAIT_S, Result, write_part
from framework.checkpoint.store import Store
from framework.checkpoint.writer import Writer
from tests.checkpoint.lone_trainer import CHUNKS, fill, job_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    """Two of them, ended hard whatever the test did."""
    pair = [Writer(), Writer()]
    yield pair
    for writer in pair:
        writer.process.kill()
        with contextlib.suppress(SaveError):
            writer.close()


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints, every file of which is as it was written."""
    store = Store(str(root))
    found = store.scan()
    assert found.damaged == []
    for checkpoint in found.complete:
        store.verify(checkpoint)
        for file in checkpoint.manifest.files:
            content = (Path(checkpoint.path) / file.name).read_bytes()
            assert content[file.data_start :] == bytes([checkpoint.step]) * (CHUNKS * CHUNK)
    return [checkpoint.step for checkpoint in found.complete]


# ---------------------------------------------------------------- in order


def test_two_writers_make_one_checkpoint(writers: list[Writer], tmp_path: Path) -> None:
    for step in (20, 30):
        for rank in (1, 0):
            assert writers[rank].poll() is None
            fill(writers[rank].memory, step)
            writers[rank].submit(job_of(str(tmp_path), step, rank, 2))
        results = [writer.wait() for writer in writers]
        assert all(result is not None and result.step == step and result.nbytes > CHUNKS * CHUNK for result in results)
    assert steps(tmp_path) == [20, 30]
    assert [writer.close() for writer in writers] == [None, None]
    assert [writer.process.returncode for writer in writers] == [0, 0]


def test_poll_does_not_wait(writers: list[Writer], tmp_path: Path) -> None:
    fill(writers[0].memory, 20)
    writers[0].submit(job_of(str(tmp_path), 20, 0, 1, delay_s=0.05))
    begun, turns = time.monotonic(), 0
    while (result := writers[0].poll()) is None:
        assert writers[0].busy
        turns += 1
        time.sleep(0.005)
    assert turns > 20
    assert isinstance(result, Result)
    assert not writers[0].busy
    assert CHUNKS * 0.05 < result.write_s < time.monotonic() - begun


def test_the_process_is_small_and_yields(writers: list[Writer]) -> None:
    pid = writers[0].process.pid
    code = "import framework.checkpoint.writer, sys; sys.exit(bool({'torch', 'numpy', 'fsspec'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode == 0
    deadline = time.monotonic() + 10
    while os.getpriority(os.PRIO_PROCESS, pid) != 10 + os.getpriority(os.PRIO_PROCESS, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.getsid(pid) == pid  # a Ctrl-C in the terminal does not reach it


def test_a_forked_child_that_holds_the_pipe_does_not_keep_the_process(writers: list[Writer]) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        begun = time.monotonic()
        writers[0].close()
        assert time.monotonic() - begun < 5
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---------------------------------------------------------------- trouble


def test_it_is_deaf_to_the_signals_that_end_a_trainer(writers: list[Writer], tmp_path: Path) -> None:
    fill(writers[0].memory, 20)
    writers[0].submit(job_of(str(tmp_path), 20, 0, 1, delay_s=0.05))
    while not list(tmp_path.glob(".tmp-*/*.safetensors")):
        time.sleep(0.005)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        writers[0].process.send_signal(number)
    writers[0].wait()
    assert steps(tmp_path) == [20]


def test_a_full_disk_is_told_to_both_ranks_at_once(writers: list[Writer], tmp_path: Path) -> None:
    limit = 3 * CHUNK + 17
    resource.prlimit(writers[1].process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    begun = time.monotonic()
    for rank, writer in enumerate(writers):
        fill(writer.memory, 20)
        writer.submit(job_of(str(tmp_path), 20, rank, 2))
    for writer in writers:
        with pytest.raises(SaveError, match=r"checkpoint of step 20(.|\n)*rank 1: File too large"):
            writer.wait()
    assert time.monotonic() - begun < 4  # not only when rank 0's time is over
    assert steps(tmp_path) == []
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left == {"rank_00000.safetensors", "rank_00000.json", "rank_00001.json"}  # rank 1's data gave its room back
    assert Store(str(tmp_path)).sweep() == [".tmp-step_00000020-try-20"]


@pytest.mark.parametrize("root", ["/proc/nowhere", "/dev/null/nowhere"])
def test_a_folder_that_cannot_be_written_is_a_letter(root: str) -> None:
    job = job_of(root, 20, 0, 1)
    letter = rf"checkpoint of step 20 in {root}; got rank 0: .+; expected room for {CHUNKS * CHUNK} bytes"
    with pytest.raises(SaveError, match=letter):
        write_part(job, lambda plan: [memoryview(bytes(plan.nbytes))])


def test_a_rank_that_never_comes_is_named(writers: list[Writer], tmp_path: Path) -> None:
    fill(writers[0].memory, 20)
    job = job_of(str(tmp_path), 20, 0, 3)
    writers[0].submit(replace(job, timeout_s=0.3))
    with pytest.raises(SaveError, match=r"no part of ranks \[1, 2\] after 0.3 s"):
        writers[0].wait()
    assert steps(tmp_path) == []


def test_a_killed_writer_is_noticed(writers: list[Writer], tmp_path: Path) -> None:
    fill(writers[0].memory, 20)
    writers[0].submit(job_of(str(tmp_path), 20, 0, 1, delay_s=0.1))
    writers[0].process.kill()
    with pytest.raises(SaveError, match="ended with status -9"):
        writers[0].wait()
    writers[0].submit(job_of(str(tmp_path), 30, 0, 1))  # the pipe is broken by now
    with pytest.raises(SaveError, match="ended with status -9"):
        writers[0].wait()


# ---------------------------------------------------------------- killed


class Run:
    """Lone trainers of two ranks, or of one of the two, that have submitted step 20; rank 1 is slow."""

    def __init__(self, root: Path, ranks: tuple[int, ...] = (0, 1), first_step: int = 10) -> None:
        command = [sys.executable, "-m", "tests.checkpoint.lone_trainer", str(root), str(first_step)]
        self.trainers = [
            subprocess.Popen([*command, str(rank), "2", str(0.02 + 0.05 * rank)], cwd=ROOT, stdout=subprocess.PIPE) for rank in ranks
        ]
        self.writers = [int(trainer.stdout.readline()) for trainer in self.trainers if trainer.stdout]
        self.identities = [owner(pid) for pid in self.writers]

    def kill(self, writers_too: bool) -> None:
        for pid in [*(trainer.pid for trainer in self.trainers), *(self.writers if writers_too else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for_writers(self) -> None:
        for trainer in self.trainers:
            trainer.communicate()
        deadline = time.monotonic() + 20
        for identity in self.identities:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                while owner(identity["pid"]) == identity:
                    assert time.monotonic() < deadline, "a writer outlives its work"
                    time.sleep(0.02)


@pytest.mark.slow
def test_an_orphan_does_not_wait_for_ranks_that_never_began(tmp_path: Path) -> None:
    run = Run(tmp_path, ranks=(0,), first_step=20)
    run.kill(writers_too=False)
    begun = time.monotonic()
    run.wait_for_writers()
    assert ORPHAN_WAIT_S < time.monotonic() - begun < ORPHAN_WAIT_S + 5
    assert steps(tmp_path) == []
    assert Store(str(tmp_path)).sweep() == [".tmp-step_00000020-try-20"]


@pytest.mark.parametrize("moment_s", [0.0, 0.25, 0.5, *(pytest.param(0.04 + tenth / 10, marks=pytest.mark.slow) for tenth in range(10))])
@pytest.mark.parametrize("writers_too", [False, True], ids=["trainers", "everybody"])
def test_a_kill_leaves_nothing_that_only_looks_complete(moment_s: float, writers_too: bool, tmp_path: Path) -> None:
    run = Run(tmp_path)
    time.sleep(moment_s)
    run.kill(writers_too)
    run.wait_for_writers()
    assert steps(tmp_path) in ([[10], [10, 20]] if writers_too else [[10, 20]])  # a writer finishes what it has begun
    Store(str(tmp_path)).sweep()
    found = steps(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in found]
    assert all((tmp_path / f"step_{step:08d}" / MANIFEST).exists() for step in found)

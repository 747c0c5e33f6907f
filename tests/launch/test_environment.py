"""What a process learns of its place from the environment and the launcher's flag, and what it refuses to believe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.base.errors import ConfigError, StartError
from framework.launch.environment import Process, default_threads, read_process, refuse_sweep, remove_stale_compile_locks, strip_local_rank

HOUR = 3600.0


def test_without_a_launcher_there_is_one_rank() -> None:
    process = read_process({}, None)
    assert (process.rank, process.local_rank, process.ranks, process.ranks_per_host, process.first) == (0, 0, 1, 1, True)


def test_what_torchrun_sets_on_the_second_of_two_hosts() -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    process = read_process(environment, None)
    assert (process.rank, process.local_rank, process.ranks, process.ranks_per_host, process.first) == (5, 1, 8, 4, False)


def test_the_flag_counts_where_the_environment_is_silent() -> None:
    assert read_process({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1).local_rank == 1


@pytest.mark.parametrize(
    ("environment", "subject"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK"),
    ],
)
def test_a_place_that_cannot_be_is_refused(environment: dict[str, str], subject: str) -> None:
    with pytest.raises(StartError) as caught:
        read_process(environment, None)
    assert caught.value.subject == subject
    assert caught.value.exit_code == 2


def test_words_keep_their_order_without_the_flag() -> None:
    assert strip_local_rank(["a=1", "--local_rank", "3", "b=2", "-m"]) == (["a=1", "b=2", "-m"], 3)
    assert strip_local_rank(["local_rank=3", "--local_ranks=1"]) == (["local_rank=3", "--local_ranks=1"], None)


def test_threads_share_the_cores_and_are_at_least_one() -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_threads(1) == cores
    assert default_threads(cores) == 1
    assert default_threads(3 * cores) == 1


def test_a_sweep_is_refused_in_a_rank_only() -> None:
    refuse_sweep(["-m", "seed=1,2"], {})
    refuse_sweep(["seed=1"], {"RANK": "0"})
    with pytest.raises(ConfigError, match=re.escape("a sweep inside a rank")):
        refuse_sweep(["seed=1,2", "--multirun"], {"RANK": "0"})


def old_lock(root: Path) -> Path:
    """A lock as torch's extension builder makes it, an hour old."""
    lock = root / "py311_cpu" / "shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - HOUR, time.time() - HOUR))
    return lock


def test_a_lock_that_nobody_holds_is_found(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    assert remove_stale_compile_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [lock]
    assert not lock.exists()


def test_a_lock_of_a_living_compiler_is_left_alone(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    with lock.open():  # as torch's FileBaton does while it builds
        assert remove_stale_compile_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []
    with (lock.parent / "main.o").open("w"):  # as a compiler that it has started does
        assert remove_stale_compile_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_a_young_lock_is_left_alone(tmp_path: Path) -> None:
    os.utime(old_lock(tmp_path))
    assert remove_stale_compile_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == []


def test_without_a_variable_the_users_cache_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    lock = old_lock(tmp_path / ".cache" / "torch_extensions")
    assert remove_stale_compile_locks({}) == [lock]


def test_looking_at_the_environment_imports_no_torch() -> None:
    script = "import sys, framework.launch.environment, framework.launch.entry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert Process().first

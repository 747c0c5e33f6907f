"""P11 (hydra-ecosystem/hydra#2070): nothing of one job reaches the next: no process group, no port, no random state, no folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import runs
from tests.ranks import launch
from tests.sweeps import command, sweep, table


@pytest.mark.slow
def test_each_job_is_a_fresh_single_run(tmp_path: Path) -> None:
    done = sweep(["seed=1,2,3", "launch.num_procs=2", "model.dropout=0.1", "verify.hash_every=1"], tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert done.left_behind == ()
    root = tmp_path / "runs/sweep"
    jobs = [f"model.dropout=0.1,seed={seed},verify.hash_every=1" for seed in (1, 2, 3)]
    assert sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")) == jobs
    for number, job in enumerate(jobs):
        alone = launch(command([*job.split(","), f"name=alone{number}"], tmp_path, 3), 2, tmp_path, 120)
        assert alone.code == 0, alone.stderr
        fresh = tmp_path / f"runs/alone{number}"
        assert runs.losses(root / job) == runs.losses(fresh)
        hashes = runs.hashes(root / job)
        assert {rank for _, rank in hashes} == {0, 1}  # both ranks in the same folder
        assert hashes == runs.hashes(fresh)
        assert runs.whole_steps(root / job / "checkpoints")[-1] == 3


@pytest.mark.slow
def test_two_sweeps_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: sweep([f"name={name}", "seed=1,2", "launch.num_procs=2"], tmp_path), ("a", "b")))
    assert [done.code for done in found] == [0, 0]
    for seed in (1, 2):
        assert runs.losses(tmp_path / f"runs/a/seed={seed}") == runs.losses(tmp_path / f"runs/b/seed={seed}")


@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_a_failing_job_does_not_stop_the_rest_unless_told(fast: bool, tmp_path: Path) -> None:
    """The first job's data does not exist."""
    (tmp_path / "a").touch()
    done = sweep(["data.cache=/proc/nowhere,cache", f"launch.fail_fast={str(fast).lower()}"], tmp_path)
    assert done.code == 1, done.stdout + done.stderr
    statuses = [row["status"] for row in table(tmp_path / "runs/sweep").values()]
    assert statuses == (["failed", "waiting"] if fast else ["failed", "done"])
    assert "Traceback" not in done.stdout

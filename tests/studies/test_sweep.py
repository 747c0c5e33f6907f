"""Sweeps through the command line: what a job is, what is left of it, and what the sweep says in the end."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from framework.launch.tree import shares
from framework.studies.sweep import folder_name
from tests import runs
from tests.ranks import Completed, Job, launch

RECIPE = """# @package _global_
defaults:
  - override /data: synthetic

name: sweep
steps: STEPS
schedule: {total_steps: STEPS}
batch: {global_size: 4, micro_size: 1}
data: {synthetic_tokens: 5000, seq_length: 16, workers: 0}
model: {hidden_size: 32, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 64, vocab_size: 64}
eval: {every: -1}
monitor: {console: none, curve: false}
launch: {threads: 1}
"""


def test_folder_names() -> None:
    assert folder_name(["zero=stage1", "recipe=tiny", "seed=2", "launch.num_procs=2", "name=x", "output_root=y"]) == "seed=2,zero=stage1"
    assert folder_name(["recipe=tiny"]) == "job"
    assert folder_name(["+model.dropout=0.1", "hydra.verbose=true"]) == "+model.dropout=0.1"
    strange = [folder_name([f"data.files=[a/{name},b]"]) for name in "cd"]
    assert strange[0] != strange[1]
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-=,") for name in strange)
    long = folder_name([f"model.k{number}=1" for number in range(40)])
    assert len(long) <= 120


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_shares_do_not_overlap_while_there_is_enough(parts: int) -> None:
    cores = os.sched_getaffinity(0)
    found = [share.cores for share in shares(parts)]
    assert len(found) == parts
    assert all(share and share <= cores for share in found)
    if parts <= len(cores):
        assert sum(len(share) for share in found) == len(frozenset().union(*found))


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares(2)] == ["4,5", "6,7"]


# ---------------------------------------------------------------- whole sweeps


def command(words: Sequence[str], cwd: Path, steps: int) -> list[str]:
    """The words of a small run."""
    (cwd / "conf/recipe").mkdir(parents=True, exist_ok=True)
    (cwd / "conf/recipe/small.yaml").write_text(RECIPE.replace("STEPS", str(steps)))
    return ["framework.train", "--config-dir", "conf", "recipe=small", *words]


def sweep(words: Sequence[str], cwd: Path, steps: int = 3) -> Completed:
    return launch(command(["-m", *words], cwd, steps), None, cwd, 300)


def table(root: Path) -> dict[str, dict[str, str]]:
    with (root / "sweep.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def test_one_process_each(tmp_path: Path) -> None:
    """Two jobs, and the same sweep once more."""
    words = ["name=s", "seed=1,2", "checkpoint=none"]
    done = sweep(words, tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert done.left_behind == ()
    root = tmp_path / "runs/s"
    names = [f"checkpoint=none,seed={seed}" for seed in (1, 2)]
    assert list(table(root)) == names
    for name in names:
        row, losses = table(root)[name], runs.losses(root / name)
        assert (row["status"], row["steps"]) == ("done", "3")
        assert float(row["final_loss"]) == losses[3][0]
        assert float(row["best_loss"]) == min(loss for loss, _ in losses.values())
    started, before = [runs.facts(root / name)["starts"] for name in names], table(root)
    again = sweep(words, tmp_path)
    assert again.code == 0
    assert [runs.facts(root / name)["starts"] for name in names] == started
    assert table(root) == before


def test_words_that_hydra_cannot_read_are_a_letter(tmp_path: Path) -> None:
    refused = sweep(["zero=stage1,stage7"], tmp_path)
    assert refused.code == 2
    assert "stage7" in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout


@pytest.mark.slow
def test_four_jobs_are_four_single_runs(tmp_path: Path) -> None:
    done = sweep(["zero=stage1,stage2", "seed=1,2", "launch.num_procs=2"], tmp_path, steps=20)
    assert done.code == 0, done.stdout + done.stderr
    root = tmp_path / "runs/sweep"
    rows = table(root)
    assert {row["status"] for row in rows.values()} == {"done"}
    assert list(rows) == [f"seed={seed},zero=stage{stage}" for stage in (1, 2) for seed in (1, 2)]
    for number, job in enumerate(rows):
        alone = launch(command([*job.split(","), f"name=alone{number}"], tmp_path, 20), 2, tmp_path, 120)
        assert alone.code == 0, alone.stderr
        assert runs.losses(root / job) == runs.losses(tmp_path / f"runs/alone{number}")
        assert runs.whole_steps(root / job / "checkpoints")[-1] == 20


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


@pytest.mark.slow
def test_a_sweep_that_is_asked_to_stop(tmp_path: Path) -> None:
    words = command(["-m", "seed=1,2", "launch.num_procs=2"], tmp_path, 100_000)
    run = tmp_path / "runs/sweep/seed=1"
    with Job(words, None, tmp_path) as job:
        while len(runs.losses(run)) < 10:
            assert job.running(), job.output()
            time.sleep(0.1)
        job.send(signal.SIGTERM)
        ended = job.wait(60)
    assert ended.code == 75, ended.stdout + ended.stderr
    assert ended.left_behind == ()
    assert runs.facts(run)["status"] == "stopped"
    assert runs.whole_steps(run / "checkpoints")[-1] == max(runs.losses(run))
    assert not (tmp_path / "runs/sweep/seed=2").exists()


@pytest.mark.slow
def test_a_job_that_takes_too_long(tmp_path: Path) -> None:
    done = sweep(["seed=1", "launch.job_limit=15"], tmp_path, steps=100_000)
    assert done.code == 75
    assert runs.facts(tmp_path / "runs/sweep/seed=1")["status"] == "stopped"


@pytest.mark.slow
def test_jobs_side_by_side(tmp_path: Path) -> None:
    done = sweep(["seed=1,2", "launch.parallel_jobs=2"], tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert {row["status"] for row in table(tmp_path / "runs/sweep").values()} == {"done"}

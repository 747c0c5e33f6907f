"""Sweeps through the command line: what a job is, what is left of it, and what the sweep says in the end."""

from __future__ import annotations

import math
import os
import shlex
import signal
import statistics
import time
from pathlib import Path

import pytest
import yaml

from framework.launch.tree import shares
from framework.studies.sweep import folder_name
from tests import runs
from tests.ranks import ROOT, Job, launch
from tests.sweeps import command, sweep, table


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


def test_a_dry_sweep_shows_the_command_of_each_job(tmp_path: Path) -> None:
    done = sweep(["seed=1,2", "launch.num_procs=2", "launch.dry_run=true"], tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    for seed in (1, 2):
        assert f"--num_gpus 2 --module framework.train recipe=small seed={seed} launch.num_procs=2\n" in done.stdout
    assert not (tmp_path / "runs/sweep/seed=1").exists()


@pytest.mark.slow
def test_optuna_ends_in_the_better_half(tmp_path: Path) -> None:
    """The command in the recipe's header: 8 trials over three decades of rates; in 40 steps the higher ones learn more."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    lines = (ROOT / "recipes/tiny_lr.yaml").read_text().split("# Command")[1].split("# Expected")[0]
    words = shlex.split(lines.replace("\n#", " "))
    done = launch(words[words.index("framework.train") :], None, tmp_path, 360)
    assert done.code == 0, done.stdout + done.stderr
    rows = list(table(tmp_path / "runs/tiny_lr").values())
    assert len(rows) == 8
    judged = {float(row["overrides"].partition("optimizer.lr=")[2].split()[0]): float(row["eval_loss"]) for row in rows}
    best = yaml.safe_load((tmp_path / "runs/tiny_lr/optimization_results.yaml").read_text())
    assert best["best_value"] == min(judged.values())
    assert judged[best["best_params"]["optimizer.lr"]] == best["best_value"]
    assert best["best_params"]["optimizer.lr"] > math.sqrt(1e-5 * 1e-2)
    losses = list(judged.values())
    assert statistics.mean(losses[4:]) < statistics.mean(losses[:4])  # after four at random it knows where to look


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
def test_each_job_is_a_tracked_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = sweep(["seed=1,2", "monitor.wandb=true"], tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    folders = [tmp_path / f"runs/sweep/monitor.wandb=True,seed={seed}" for seed in (1, 2)]  # as Hydra spells it
    ids = [runs.facts(folder)["tracker_run_id"] for folder in folders]
    assert len(set(ids)) == 2
    for folder, name in zip(folders, ids, strict=True):
        [kept] = (folder / "wandb").glob("offline-run-*")
        assert kept.name.endswith(f"-{name}")
        assert list(kept.glob("*.wandb"))


@pytest.mark.slow
def test_jobs_side_by_side(tmp_path: Path) -> None:
    done = sweep(["seed=1,2", "launch.parallel_jobs=2"], tmp_path)
    assert done.code == 0, done.stdout + done.stderr
    assert {row["status"] for row in table(tmp_path / "runs/sweep").values()} == {"done"}

"""What the launcher plugin leans on in Hydra 1.3: how a launcher is found, what it is given, and who gets what it returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

# In a process of its own: Hydra's plugins and sys.argv are the process's. The jobs are not run, only written down.
SWEEP = """
import json, sys
from framework.launch.hydra_plugin import multirun

given = []

def run_jobs(words):
    given.append([list(job) for job in words])
    return [float(len(given) * 10 + number) for number, _ in enumerate(words)]

multirun(sys.argv[1:], run_jobs)
print(json.dumps(given))
"""


def sweep(words: list[str], cwd: Path) -> list[list[list[str]]]:
    """Batches of jobs, each job as its words."""
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, "-m", *words], cwd=cwd, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_launcher_is_found_and_gets_all_jobs_at_once(tmp_path: Path) -> None:
    [jobs] = sweep(["recipe=tiny", "zero=stage1,stage2", "seed=1,2"], tmp_path)
    assert jobs == [["recipe=tiny", f"zero=stage{stage}", f"seed={seed}"] for stage in (1, 2) for seed in (1, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # nothing of Hydra's beside the runs
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny"]


def test_globs_of_groups_are_spelled_out(tmp_path: Path) -> None:
    [jobs] = sweep(["recipe=tiny", "zero=glob(stage2*)"], tmp_path)
    assert jobs == [["recipe=tiny", "zero=stage2"], ["recipe=tiny", "zero=stage2_offload"]]


def test_values_go_back_to_the_sweeper(tmp_path: Path) -> None:
    """Optuna asks for one trial after the other, and writes down the best: of 10, 20, 30 the first."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.direction=minimize"]
    jobs = sweep([*words, "hydra.sweeper.sampler.seed=1", "recipe=tiny", "optimizer.lr=interval(0.001,0.1)"], tmp_path)
    rates = [float(word.partition("=")[2]) for [job] in jobs for word in job if word.startswith("optimizer.lr=")]
    assert len(set(rates)) == 3
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    best = (tmp_path / "runs/tiny/optimization_results.yaml").read_text()
    assert f"optimizer.lr: {rates[0]}" in best
    assert "best_value: 10.0" in best

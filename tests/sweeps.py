"""Whole sweeps and launches of a recipe whose runs take seconds, and what sweep.csv says of them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import Completed, launch

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


def command(words: Sequence[str], cwd: Path, steps: int) -> list[str]:
    """The words of a small run of framework.train, to be started in `cwd`."""
    (cwd / "conf/recipe").mkdir(parents=True, exist_ok=True)
    (cwd / "conf/recipe/small.yaml").write_text(RECIPE.replace("STEPS", str(steps)))
    return ["framework.train", "--config-dir", "conf", "recipe=small", *words]


def sweep(words: Sequence[str], cwd: Path, steps: int = 3) -> Completed:
    """A sweep, brought to its end."""
    return launch(command(["-m", *words], cwd, steps), None, cwd, 300)


def table(root: Path) -> dict[str, dict[str, str]]:
    """The rows of sweep.csv, by job."""
    with (root / "sweep.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}

"""The levels ops and kernels on whole trainings: no number changes, the window is the one that was asked for, its files say what ran."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

BARE = [*runs.SMALL, "checkpoint=none", "precision=fp32"]
KERNELS = ["profile=kernels", "profile.first=3", "profile.steps=2"]


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "runs/run/profile" / name).read_text())


@pytest.mark.slow
def test_kernels_of_a_run(tmp_path: Path) -> None:
    text = runs.train([*BARE, *KERNELS, "steps=6", "model.dropout=0.1", "monitor.console=plain", "eval.every=3"], tmp_path)
    runs.train([*BARE, "steps=6", "model.dropout=0.1", "name=blind", "eval.every=3"], tmp_path)
    assert runs.losses(tmp_path / "runs/run") == runs.losses(tmp_path / "runs/blind")

    (event,) = runs.events(tmp_path / "runs/run", "profile")
    assert (event["step"], event["steps"], event["level"]) == (4, 2, "kernels")
    files = {path.relative_to(tmp_path / "runs/run").as_posix() for path in (tmp_path / "runs/run/profile").iterdir()}
    assert set(event["files"]) == files
    assert "operators of rank 0" in text

    rows = read(tmp_path, "ops.json")
    assert len(rows) == 10
    assert [row["self_s"] for row in rows] == sorted((row["self_s"] for row in rows), reverse=True)
    assert 0 < sum(row["share"] for row in rows) <= 1
    assert json.loads(gzip.decompress((tmp_path / "runs/run/profile/trace_0.json.gz").read_bytes()))["traceEvents"]


def test_flop_are_those_of_the_model(tmp_path: Path) -> None:
    """Against the closed form of the model, and against torch's own count of matrix products; an evaluation does not count."""
    words = [*BARE, "profile=kernels", "profile.first=2", "profile.steps=1", "eval.every=1", "eval.samples=8", "optimizer=sgd"]
    runs.train([*words, "steps=3", "batch.global_size=2", "batch.micro_size=2", "model.num_layers=2"], tmp_path)
    page = read(tmp_path, "kernels.json")
    tokens, hidden, wide, vocabulary, length = 2 * 16, 32, 64, 64, 16
    matrices = 2 * (4 * hidden * hidden + 3 * hidden * wide) + hidden * vocabulary
    attention = 2 * (4 + 10) * tokens * length * hidden // 2  # of two blocks: products of 2 (forward) and 5 (backward), half for causal
    assert page["flop"] == 6 * tokens * matrices + attention
    assert page["torch_flop"] >= 6 * tokens * matrices


@pytest.mark.slow
def test_a_run_that_ends_inside_the_window_and_one_that_ends_before(tmp_path: Path) -> None:
    runs.train([*BARE, "profile=ops", "profile.first=2", "profile.steps=9", "steps=3"], tmp_path)
    (event,) = runs.events(tmp_path / "runs/run", "profile")
    assert (event["step"], event["steps"], event["files"]) == (3, 2, ["profile/ops.json"])
    runs.train([*BARE, "profile=ops", "steps=3", "name=short"], tmp_path)
    (event,) = runs.events(tmp_path / "runs/short", "profile")
    assert (event["steps"], event["files"]) == (0, [])
    assert "no step of the window" in event["says"]


def fail_in_step_4() -> None:
    from framework.base.errors import RunError
    from framework.engine.sharded import DeepSpeedEngine

    plain, done = DeepSpeedEngine.step, list[int]()

    def step(self: Any, *inputs: Any) -> Any:
        done.append(1)
        if len(done) == 4:
            raise RunError("planted")
        return plain(self, *inputs)

    DeepSpeedEngine.step = step


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_fails_inside_the_window(rank: int, tmp_path: Path) -> None:
    words = [*BARE, "profile=kernels", "profile.first=2", "profile.steps=9", f"profile.rank={rank}", "steps=6"]
    runs.train(words, tmp_path, ranks=2, code=1, prepare=fail_in_step_4)
    (event,) = runs.events(tmp_path / "runs/run", "profile")
    assert (event["step"], event["steps"]) == (3, 2)
    assert ("profile/kernels.json" in event["files"]) == (rank == 0)
    assert ("says" in event) == (rank == 1)
    assert read(tmp_path, "kernels.json")["steps"] == 2


@pytest.mark.slow
def test_another_rank_from_the_first_step(tmp_path: Path) -> None:
    runs.train([*BARE, "zero=stage2", "profile=ops", "profile.rank=1", "profile.first=1", "profile.steps=2", "steps=4"], tmp_path, ranks=2)
    (event,) = runs.events(tmp_path / "runs/run", "profile")
    assert (event["rank"], event["step"], event["steps"]) == (1, 2, 2)
    assert len(read(tmp_path, "ops.json")) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["zero=stage3", "precision=bf16"],
        ["zero=stage0", "precision=bf16_autocast", "recompute=full"],
        ["parallel=pipeline2", "zero=stage1", "model.num_layers=4"],
        ["parallel=tensor2_sequence", "zero=stage1", "recompute=selective"],
        ["zero=stage1", "precision=fp16"],
    ],
    ids=" ".join,
)
def test_every_layout_can_be_looked_at(words: list[str], tmp_path: Path) -> None:
    small = [*runs.SMALL, "checkpoint=none", "steps=5", *words]
    runs.train([*small, *KERNELS, "profile.rank=1"], tmp_path, ranks=2)
    runs.train([*small, "name=blind"], tmp_path, ranks=2)
    assert runs.losses(tmp_path / "runs/run") == runs.losses(tmp_path / "runs/blind")
    page = read(tmp_path, "kernels.json")
    assert page["rank"] == 1
    assert page["flop"] > 0
    assert page["idle"]["count"] > 0
    assert read(tmp_path, "memory_1.json")["points"]

"""The parts of each step in real runs: they add up to the step, and each stands for what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.topology.timers import PARTS
from tests.runs import PLAIN, SMALL, lines, train

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "plain": (1, [*PLAIN, "checkpoint=none"]),
    "stage 1": (2, [*SMALL, "zero=stage1", "checkpoint.every=2"]),
    "stage 3, recompute": (2, [*SMALL, "zero=stage3", "recompute=full", "checkpoint=none"]),
    "pipeline": (2, [*SMALL, "zero=stage1", "parallel=pipeline2", "checkpoint=none"]),
}


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_add_up_to_the_step(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    train([*words, "steps=8"], tmp_path, ranks)
    for step in steps(tmp_path / "runs" / "run"):
        assert tuple(step["parts"]) == PARTS
        assert sum(step["parts"].values()) == pytest.approx(step["step_time_s"], rel=0.02)
        assert step["parts"]["forward"] > 0
        assert step["parts"]["backward"] > 0
        assert step["parts"]["optimizer"] > 0
        assert (step["parts"]["communication"] > 0) == (ranks > 1)
        assert (step["parts"]["recompute"] > 0) == ("recompute=full" in words)
        assert step["hidden_s"] >= 0
        assert 0 < step["mfu"] < 1


def test_what_is_no_part_of_a_step_is_told_by_its_name(tmp_path: Path) -> None:
    train([*SMALL, "zero=stage1", "steps=6", "checkpoint=sync", "checkpoint.every=2", "eval.every=3", "eval.samples=2"], tmp_path)
    beside = {step["step"]: step["aside_s"] for step in steps(tmp_path / "runs" / "run")}
    assert beside[3]["checkpoint"] > max(beside[2].get("checkpoint", 0.0), beside[4].get("checkpoint", 0.0))
    assert {step for step, names in beside.items() if "evaluation" in names} == {4}

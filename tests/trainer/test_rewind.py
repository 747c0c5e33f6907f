"""resume=PATH to an older step: the run goes on from there, and the old line never wins again."""

from __future__ import annotations

import os
from pathlib import Path

from tests import runs
from tests.runs import PLAIN

WORDS = [*PLAIN, "checkpoint=sync", "checkpoint.every=2", "checkpoint.keep_last=0", "model.dropout=0.1"]


def names(run: Path) -> list[str]:
    return sorted(name.partition("-")[0] for name in os.listdir(run / "checkpoints"))


def test_the_newer_steps_are_set_aside(tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=6"], tmp_path)
    run = tmp_path / "runs" / "run"
    first = runs.losses(run)
    named = f"resume={run}/checkpoints/step_00000002"
    # Another rate from here on, so that the two lines can be told apart.
    runs.train([*WORDS, "steps=7", "optimizer.lr=1e-4", "resume_changes=allow", "checkpoint.every=5", named], tmp_path)
    assert names(run) == ["aside_step_00000004", "aside_step_00000006", "step_00000002", "step_00000005", "step_00000007"]
    [resumed] = runs.events(run, "resume")
    assert resumed["step"] == 2
    assert sorted(Path(path).name.partition("-")[0] for path in resumed["set_aside"]) == ["aside_step_00000004", "aside_step_00000006"]
    assert all(runs.is_whole(Path(path)) for path in resumed["set_aside"])
    second = runs.losses(run)
    assert [step for step in first if first[step] != second[step]] == [4, 5, 6]  # step 3 begins with equal weights
    runs.train([*WORDS, "steps=8", "optimizer.lr=1e-4"], tmp_path)
    assert [(event["step"], event["set_aside"]) for event in runs.events(run, "resume")][1:] == [(7, [])]


def test_a_start_that_saves_nothing_begins_no_line(tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=4"], tmp_path)
    run = tmp_path / "runs" / "run"
    runs.train([*WORDS, "steps=5", f"resume={run}/checkpoints/step_00000002", "checkpoint=none"], tmp_path)
    assert names(run) == ["step_00000002", "step_00000004"]
    assert runs.events(run, "resume")[0]["set_aside"] == []

"""P07 (huggingface/transformers#27138): retention in the wrong order. Right value: set arithmetic on integer steps.

Each case goes twice: through Store.prune, and through a run that is resumed at step 1000 (or below), trains on and saves 1100.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from framework.checkpoint.store import Store
from tests import runs

Prepare = Callable[[Path], None]


def nothing(checkpoints: Path) -> None:
    """Leave them as they were saved."""


def reverse_times(checkpoints: Path) -> None:
    """The older a step, the younger its folder and files."""
    for folder in checkpoints.iterdir():
        for path in (*folder.iterdir(), folder):
            os.utime(path, (1_000_000 - int(folder.name[5:]), 1_000_000 - int(folder.name[5:])))


def stale(checkpoints: Path) -> None:
    """Another run has left a higher step."""
    runs.copy_as(checkpoints / "step_00001000", 5000)


def incomplete(checkpoints: Path) -> None:
    (checkpoints / "step_00001000/rank_00000.safetensors").unlink()


@dataclass(frozen=True)
class Case:
    """What is done to steps 800, 900 and 1000 before 1100 is saved with keep_last, and what is whole afterwards."""

    keep_last: int
    left: list[int]
    prepare: Prepare = nothing
    best: tuple[int, ...] = ()


CASES = {
    "last two": Case(2, [1000, 1100]),
    "times reversed": Case(2, [1000, 1100], reverse_times),
    "a stale higher step": Case(2, [1000, 1100, 5000], stale),
    "an incomplete one does not count": Case(2, [900, 1100], incomplete),
    "last one": Case(1, [1100]),
    "last one and a protected best": Case(1, [900, 1100], best=(900,)),
}
WORDS = [*runs.PLAIN, "checkpoint=sync", "checkpoint.every=0", "schedule.total_steps=2000"]


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folder runs/run of a run that has saved steps 800, 900 and 1000; they differ in nothing but the step."""
    root = tmp_path_factory.mktemp("present")
    runs.train([*WORDS, "steps=5"], root)
    checkpoints = root / "runs/run/checkpoints"
    for step in (800, 900, 1000):
        runs.copy_as(checkpoints / "step_00000005", step)
    shutil.rmtree(checkpoints / "step_00000005")
    assert runs.whole_steps(checkpoints) == [800, 900, 1000]
    return root


@pytest.mark.parametrize("case", CASES)
def test_prune(case: str, present: Path, tmp_path: Path) -> None:
    given, checkpoints = CASES[case], tmp_path / "checkpoints"
    shutil.copytree(present / "runs/run/checkpoints", checkpoints)
    given.prepare(checkpoints)
    before = runs.whole_steps(checkpoints)
    store = Store(str(checkpoints))
    assert store.prune(1100, given.keep_last, keep_best=given.best) == []  # 1100 is not there yet
    assert runs.whole_steps(checkpoints) == before
    runs.copy_as(checkpoints / "step_00000800", 1100)
    os.utime(checkpoints / "step_00001100", (1, 1))
    gone = store.prune(1100, given.keep_last, keep_best=given.best)
    assert runs.whole_steps(checkpoints) == given.left
    assert gone == sorted({*before, 1100} - {*given.left})


@pytest.mark.parametrize("case", [case for case, given in CASES.items() if not given.best])
def test_a_run_that_saves_1100(case: str, present: Path, tmp_path: Path) -> None:
    """The user names step 1000 where another run has left 5000; that one is set aside, neither counted nor thrown away."""
    given, checkpoints = CASES[case], tmp_path / "runs/run/checkpoints"
    shutil.copytree(present / "runs/run", tmp_path / "runs/run")
    given.prepare(checkpoints)
    named = [f"resume={checkpoints}/step_00001000"] if given.prepare is stale else []
    runs.train([*WORDS, "steps=1100", f"checkpoint.keep_last={given.keep_last}", *named], tmp_path)
    assert runs.whole_steps(checkpoints) == [step for step in given.left if step != 5000]
    aside = [folder for folder in checkpoints.iterdir() if runs.is_whole(folder) and runs.manifest(folder)["step"] == 5000]
    assert len(aside) == (given.prepare is stale)


def test_the_best_stays_whatever_comes_after_it(tmp_path: Path) -> None:
    """The rate is far too high, so that the held-out loss is lowest early."""
    words = [*runs.PLAIN, "checkpoint=sync", "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1"]
    words += ["eval.every=1", "eval.samples=8", "optimizer.lr=0.3", "schedule=constant", "steps=12"]
    runs.train(words, tmp_path)
    run = tmp_path / "runs/run"
    held_out = {line["step"]: line["loss"] for line in runs.lines(run / "metrics.jsonl") if line["kind"] == "eval"}
    saved = [event["step"] for event in runs.events(run, "checkpoint")]
    assert saved == [2, 4, 6, 8, 10, 12]
    best = min(saved, key=lambda step: held_out[step])
    assert best < 10
    assert runs.whole_steps(run / "checkpoints") == [best, 12]

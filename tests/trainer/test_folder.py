"""The run folder: looked at without a trace, claimed once, kept when somebody wants to start anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.base.errors import ConfigError
from framework.config.compose import to_dict
from framework.config.schema import Config
from framework.monitor.runfile import End, RunFile, Start
from framework.trainer.folder import claim, inspect, read_config


def config(root: Path, **values: Any) -> Config:
    return dataclasses.replace(Config(output_root=str(root), name="r", steps=10), **values)


def a_run_that_ended(root: Path, status: End, **values: Any) -> Config:
    made = config(root, **values)
    runfile = RunFile(claim(made) / "run.json")
    runfile.begin(Start(["framework.train"], 1, ["here"], "hash", steps=made.steps))
    runfile.finish(status)
    return made


def test_nothing_there(run_root: Path) -> None:
    assert inspect(config(run_root)) is False
    assert not list(run_root.iterdir()), "looking makes nothing"


def test_what_is_claimed_reads_back_as_it_was(run_root: Path) -> None:
    made = config(run_root, seed=9)
    folder = claim(made)
    assert folder == run_root / "r"
    assert read_config(folder / "config.yaml") == made
    assert yaml.safe_load((folder / "config.yaml").read_text()) == to_dict(made)


def test_a_folder_with_only_logs_is_free(run_root: Path) -> None:
    (run_root / "r" / "logs").mkdir(parents=True)
    assert inspect(config(run_root)) is False


def test_a_folder_that_is_no_run_is_refused_whatever_resume_says(run_root: Path) -> None:
    (run_root / "r").mkdir()
    (run_root / "r" / "notes.txt").write_text("mine")
    for resume in ("auto", "never"):
        with pytest.raises(ConfigError, match="no run"):
            inspect(config(run_root, resume=resume))


ENDS = [("done", 0, True), ("done", 1, False), ("failed", 0, False), ("stopped", 0, False)]


@pytest.mark.parametrize(("status", "more_steps", "done"), ENDS)
def test_done_means_done_and_no_more_steps_wanted(run_root: Path, status: End, more_steps: int, done: bool) -> None:
    a_run_that_ended(run_root, status)
    assert inspect(config(run_root, steps=10 + more_steps)) is done


def test_fewer_steps_than_were_made_is_done(run_root: Path) -> None:
    a_run_that_ended(run_root, "done")
    assert inspect(config(run_root, steps=5)) is True


def test_another_meaning_is_refused_and_another_layout_is_not(run_root: Path) -> None:
    a_run_that_ended(run_root, "failed")
    with pytest.raises(ConfigError) as caught:
        inspect(config(run_root, seed=2))
    assert "seed" in caught.value.letter()
    assert inspect(config(run_root, batch=dataclasses.replace(Config().batch, micro_size=1))) is False
    assert inspect(config(run_root, seed=2, resume="never")) is False


def test_starting_anew_keeps_every_older_run(run_root: Path) -> None:
    for seed in (1, 2, 3):
        folder = claim(config(run_root, seed=seed, resume="never"))
        (folder / "metrics.jsonl").write_text(f"seed {seed}")
    assert sorted(path.name for path in run_root.iterdir()) == ["r", "r.old-1", "r.old-2"]
    assert [(run_root / name / "metrics.jsonl").read_text() for name in ("r.old-1", "r.old-2", "r")] == ["seed 1", "seed 2", "seed 3"]
    assert read_config(run_root / "r.old-1" / "config.yaml").seed == 1


def test_going_on_keeps_what_is_there(run_root: Path) -> None:
    folder = claim(config(run_root))
    (folder / "metrics.jsonl").write_text("kept")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "letter.txt").write_text("an old fault")
    assert claim(config(run_root, steps=20)) == folder
    assert (folder / "metrics.jsonl").read_text() == "kept"
    assert not (folder / "logs" / "letter.txt").exists(), "or the next fault would not be said"
    assert [path.name for path in run_root.iterdir()] == ["r"]

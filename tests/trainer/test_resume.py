"""What a start makes of what is there: resume=auto|never|must|PATH, settings that changed, runs that are done.

Bit-equal going on is proved by tests/cases and by framework.verify; here is what is allowed, what is refused and what is said.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from framework.data.tokens import write_tokens
from tests import runs
from tests.marks import slow
from tests.starts import assert_one_letter

WORDS = [*runs.PLAIN, "checkpoint=sync", "checkpoint.every=2", "verify.hash_every=1", "model.dropout=0.1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, and one of eight that nobody stopped."""
    root = tmp_path_factory.mktemp("trained")
    runs.train([*WORDS, "steps=4"], root)
    runs.train([*WORDS, "steps=8", "name=straight", "checkpoint=none"], root)
    return root


@pytest.fixture
def here(trained: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))


def assert_as_if_never_stopped(root: Path, name: str = "run") -> None:
    run, straight = root / "runs" / name, root / "runs/straight"
    assert runs.same_steps(runs.losses(run), runs.losses(straight))
    assert runs.same_steps(runs.hashes(run), runs.hashes(straight))
    assert max(runs.losses(run)) == 8


# ---------------------------------------------------------------- the four words


@pytest.mark.parametrize("resume", ["auto", slow("must")])
def test_more_steps_at_a_later_start_go_on(resume: str, here: Path) -> None:
    """schedule.total_steps was given, so that the rate does not know of `steps`."""
    runs.train([*WORDS, "steps=8", f"resume={resume}"], here)
    assert_as_if_never_stopped(here)
    (resumed,) = runs.events(here / "runs/run", "resume")
    assert (resumed["step"], resumed["passed_over"], resumed["random"]) == (4, [], "random numbers go on")
    assert "steps [free]: 4 -> 8" in resumed["changes"]
    assert [start["first_step"] for start in runs.facts(here / "runs/run")["starts"]] == [1, 5]


@pytest.mark.parametrize("named", ["run", slow("run/checkpoints"), slow("run/checkpoints/step_00000002/")])
def test_a_path_goes_on_under_another_name(named: str, here: Path) -> None:
    runs.train([*WORDS, "steps=8", "name=other", f"resume=runs/{named}"], here)
    first = 3 if "2" in named else 5
    assert min(runs.losses(here / "runs/other")) == first
    assert_as_if_never_stopped(here, "other")
    assert runs.whole_steps(here / "runs/run/checkpoints") == [2, 4]


@pytest.mark.parametrize("resume", ["runs/nowhere", slow("runs/run/logs"), slow("runs/run/checkpoints/step_00000003")])
def test_a_path_without_a_checkpoint_is_refused(resume: str, here: Path) -> None:
    said = runs.train([*WORDS, "steps=8", "name=other", f"resume={resume}"], here, code=2)
    assert_one_letter(said, resume)
    assert not runs.losses(here / "runs/other")


def test_must_with_nothing_there(tmp_path: Path) -> None:
    said = runs.train([*WORDS, "steps=4", "resume=must"], tmp_path, code=2)
    assert_one_letter(said, "resume", "must, and there is no checkpoint", "runs/run/checkpoints")
    assert not runs.losses(tmp_path / "runs/run")


def test_never_begins_anew_beside_the_old_run(here: Path) -> None:
    runs.train([*WORDS, "steps=8", "resume=never"], here)
    assert_as_if_never_stopped(here)
    assert sorted(runs.losses(here / "runs/run")) == list(range(1, 9))
    assert runs.whole_steps(here / "runs/run.old-1/checkpoints") == [2, 4]
    assert runs.events(here / "runs/run", "resume") == []


# ---------------------------------------------------------------- settings that changed


def test_a_changed_meaning_is_listed_and_refused(here: Path) -> None:
    for words in ([], ["name=other", "resume=runs/run"]):
        said = runs.train([*WORDS, "steps=8", "optimizer.lr=0.01", "seed=2", *words], here, code=2)
        assert_one_letter(said, "optimizer.lr: 0.003 there, 0.01 now", "seed: 1 there, 2 now", "resume_changes=allow")
    runs.train([*WORDS, "steps=8"], here)  # the refusals have changed nothing
    assert_as_if_never_stopped(here)


def test_a_changed_meaning_that_is_allowed_is_noted_and_holds(here: Path) -> None:
    words = [*WORDS, "optimizer.lr=0.01", "resume_changes=allow"]
    runs.train([*words, "steps=6"], here)
    run = here / "runs/run"
    (resumed,) = runs.events(run, "resume")
    assert "optimizer.lr [meaning]: 0.003 -> 0.01" in resumed["changes"]
    straight = runs.losses(here / "runs/straight")
    assert runs.losses(run)[5] == straight[5]  # begins with equal weights
    assert runs.losses(run)[6] != straight[6]
    # From now on the new value is the run's own.
    said = runs.train([*WORDS, "steps=8"], here, code=2)
    assert_one_letter(said, "optimizer.lr: 0.01 there, 0.003 now")


def test_a_changed_layout_is_noted_and_allowed(here: Path) -> None:
    runs.train([*WORDS, "steps=8", "batch.micro_size=2"], here)
    (resumed,) = runs.events(here / "runs/run", "resume")
    assert "batch.micro_size [layout]: 4 -> 2" in resumed["changes"]
    assert max(runs.losses(here / "runs/run")) == 8


def test_more_ranks_say_what_cannot_go_on(here: Path) -> None:
    runs.train([*WORDS, "steps=8", "engine=deepspeed", "zero=stage2", "batch.micro_size=2"], here, ranks=2)
    (resumed,) = runs.events(here / "runs/run", "resume")
    assert resumed["random"] == "random numbers begin anew: saved on 1 ranks, 2 now"
    assert {"engine [layout]: plain -> deepspeed", "zero.stage [layout]: 0 -> 2"} <= set(resumed["changes"])
    assert max(runs.losses(here / "runs/run")) == 8


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    words = [*WORDS, "data=tokens", "data.files=[corpus]"]
    write_tokens(tmp_path / "corpus", [np.arange(4000) % 64], np.dtype("<u2"))
    runs.train([*words, "steps=4"], tmp_path)
    write_tokens(tmp_path / "corpus", [np.arange(4000) % 63], np.dtype("<u2"))
    said = runs.train([*words, "steps=8"], tmp_path, code=2)
    assert_one_letter(said, "the data's content")
    assert max(runs.losses(tmp_path / "runs/run")) == 4
    runs.train([*words, "steps=8", "resume_changes=allow"], tmp_path)
    (resumed,) = runs.events(tmp_path / "runs/run", "resume")
    assert any(change.startswith("the data's content [meaning]: ") for change in resumed["changes"])


# ---------------------------------------------------------------- done


def test_a_finished_run_says_so_and_does_nothing(here: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (here / "runs/run").rglob("*")}
    said = runs.train([*WORDS, "steps=4"], here)
    assert "runs/run is done, 4 steps" in said
    assert "resume=never" in said
    assert {path: path.stat().st_mtime_ns for path in (here / "runs/run").rglob("*")} == before


@pytest.mark.slow
def test_a_start_that_failed_does_not_make_a_longer_run_done(here: Path) -> None:
    """It was refused after config.yaml had been written for eight steps, of which four are made."""
    kept = here / "kept"
    (here / "runs/run/checkpoints").rename(kept)
    for _ in range(2):
        said = runs.train([*WORDS, "steps=8"], here, code=2)
        assert_one_letter(said, "though step 4 was saved", "resume=never")
    kept.rename(here / "runs/run/checkpoints")
    runs.train([*WORDS, "steps=8"], here)
    assert_as_if_never_stopped(here)


def test_a_run_that_has_lost_its_checkpoints_does_not_silently_begin_anew(here: Path) -> None:
    """`steps` is raised, and `checkpoint.root` is another than before."""
    said = runs.train([*WORDS, "steps=8", "checkpoint.root=elsewhere"], here, code=2)
    assert_one_letter(said, "checkpoints of runs/run", "none in elsewhere, though step 4 was saved", "resume=PATH")
    runs.train([*WORDS, "steps=8", "checkpoint.root=elsewhere", "resume=runs/run/checkpoints"], here)
    assert_as_if_never_stopped(here)
    assert runs.whole_steps(here / "elsewhere") == [6, 8]

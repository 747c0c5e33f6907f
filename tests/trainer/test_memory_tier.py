"""The memory tier: room is asked for first, what nobody needs is removed, and the newest State of either tier is taken up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.base.errors import ConfigError, RunError
from framework.base.files import write_json
from framework.trainer import memory_tier
from framework.trainer.run import Run, Turn
from framework.trainer.saving import Saver
from tests import runs
from tests.runs import PLAIN


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(memory_tier, "SHARED_MEMORY", folder)
    return folder


def run_folder(tmp_path: Path, name: str, status: str | None) -> str:
    """A run folder whose run.json says `status`; None for a run that is not there any more."""
    folder = tmp_path / "runs" / name
    if status is not None:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
        write_json(folder / "run.json", {"status": status})
    return str(folder)


def test_each_run_has_a_folder_of_its_own_wherever_it_is_named_from(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = memory_tier.memory_root("runs/one")
    assert one == memory_tier.memory_root(f"{tmp_path}/runs/../runs/one")
    assert one != memory_tier.memory_root("runs/two")
    assert one.parent == shared


def test_too_little_room_is_refused_and_nothing_stays(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tier, "free_bytes", lambda _folder: 1999)
    run = run_folder(tmp_path, "one", "running")
    with pytest.raises(ConfigError) as caught:
        memory_tier.prepare(run, 5000)
    assert (caught.value.subject, caught.value.write) == ("checkpoint.memory_every", "checkpoint.memory_every=0")
    assert "1999 bytes" in str(caught.value.got)
    assert "10000 bytes" in caught.value.expected
    assert list(shared.iterdir()) == []


def test_what_the_run_left_there_counts_as_room(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path, "one", "running")
    memory_tier.prepare(run, 1000)
    (memory_tier.memory_root(run) / "step").write_bytes(bytes(1000))
    monkeypatch.setattr(memory_tier, "free_bytes", lambda _folder: 1000)
    memory_tier.prepare(run, 1000)
    assert (memory_tier.memory_root(run) / "step").exists()
    assert [folder.name for folder in shared.iterdir()] == [memory_tier.memory_root(run).name]


def test_sweep_keeps_what_somebody_may_go_on_with(shared: Path, tmp_path: Path) -> None:
    kept = {name: run_folder(tmp_path, name, name) for name in ("running", "stopped", "failed")}
    over = {name: run_folder(tmp_path, name, status) for name, status in (("done", "done"), ("gone", None))}
    for run in (*kept.values(), *over.values()):
        memory_tier.prepare(run, 1)
    (memory_tier.memory_root("x").parent / f"{memory_tier._prefix()}nobody").mkdir()  # made by a process killed in between
    (shared / "framework-somebodyelse-1234").mkdir()
    assert {path.name for path in memory_tier.sweep()} == {"done", "gone", f"{memory_tier._prefix()}nobody"}
    left = {memory_tier.memory_root(run).name for run in kept.values()}
    assert {folder.name for folder in shared.iterdir()} == {*left, "framework-somebodyelse-1234"}


def test_remove_of_what_is_not_there_is_no_error(shared: Path) -> None:
    memory_tier.remove("nowhere")
    assert list(shared.iterdir()) == []


# ---------------------------------------------------------------- in a run


def fail_at_step_5() -> None:
    """A run that ends as if it were killed after step 5: nobody says goodbye to the memory tier."""
    after_step = Saver.after_step

    def failing(self: Saver, run: Run, turn: Turn) -> None:
        after_step(self, run, turn)
        if turn.step == 5:
            raise RunError("step 5", "a fault on purpose")

    Saver.after_step = failing  # type: ignore[method-assign]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs" / "run"
    yield folder
    memory_tier.remove(str(folder))


@pytest.mark.parametrize(("memory", "disk"), [(5, 2), pytest.param(4, 5, marks=pytest.mark.slow)])
def test_the_newest_of_either_tier_is_taken_up(memory: int, disk: int, run: Path, tmp_path: Path) -> None:
    words = [*PLAIN, "steps=8", "model.dropout=0.1"]
    saves = ["checkpoint=async", f"checkpoint.memory_every={memory}", f"checkpoint.every={disk}"]
    runs.train([*words, "name=straight", "checkpoint=none"], tmp_path)
    runs.train([*words, *saves], tmp_path, code=1, prepare=fail_at_step_5)
    root = memory_tier.memory_root(str(run))
    assert [path.name for path in root.glob("step_*")] == [f"step_{memory:08d}"]
    runs.train([*words, *saves], tmp_path)
    [resumed] = runs.events(run, "resume")
    assert (resumed["step"], str(root) in resumed["from"]) == (5, memory == 5)
    assert runs.losses(run) == runs.losses(run.with_name("straight"))
    assert not root.exists()  # the run is done


def test_going_back_removes_a_newer_state_from_memory(run: Path, tmp_path: Path) -> None:
    words = [*PLAIN, "checkpoint=async", "checkpoint.memory_every=5", "checkpoint.every=2"]
    runs.train([*words, "steps=8"], tmp_path, code=1, prepare=fail_at_step_5)
    root = memory_tier.memory_root(str(run))
    runs.train([*words, "steps=4", f"resume={run}/checkpoints/step_00000002", "checkpoint.memory_every=0"], tmp_path)
    assert not root.exists()
    assert sorted(path.name.partition("-")[0] for path in (run / "checkpoints").iterdir()) == [
        "aside_step_00000004", "step_00000002", "step_00000004",
    ]  # fmt: skip

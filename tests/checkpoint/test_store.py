"""What counts as a checkpoint, what is refused, and what is thrown away."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from framework.checkpoint.buffers import live
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.folders import ABANDONED_S, owner
from framework.checkpoint.load import load
from framework.checkpoint.manifest import MANIFEST, arrange
from framework.checkpoint.save import Job, commit, write_part
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import State
from framework.checkpoint.store import Store, find, free_bytes, retained

Save = Callable[..., Path]


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in Store(str(root)).complete()]


# ---------------------------------------------------------------- what counts


def test_steps_are_in_the_order_of_integers(save: Save, tmp_path: Path) -> None:
    for step in (900, 1000, 123456789, 99):
        save(step)
    assert steps(tmp_path) == [99, 900, 1000, 123456789]
    newest = Store(str(tmp_path)).newest()
    assert newest is not None
    assert newest.manifest.small == {"step": 123456789}


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert Store(str(tmp_path / "none")).newest() is None


def test_small_and_local_state_come_back(save: Save, tmp_path: Path) -> None:
    save(3, tensor_ranks=2, data_ranks=2)
    checkpoint = Store(str(tmp_path)).complete()[0]
    assert checkpoint.manifest.local == [{"rank": rank} for rank in range(4)]
    assert checkpoint.shapes()["exp_avg", "embed.weight"] == (7, 3)
    assert {path.name for path in (tmp_path / "step_00000003").iterdir()} == {
        MANIFEST, *(f"rank_{rank:05d}.safetensors" for rank in range(4)),
    }  # fmt: skip


def shorten(folder: Path) -> None:
    os.truncate(folder / "rank_00001.safetensors", (folder / "rank_00001.safetensors").stat().st_size - 1)


def lengthen(folder: Path) -> None:
    with open(folder / "rank_00000.safetensors", "ab") as file:
        file.write(b"\0")


def flip(folder: Path) -> None:
    content = bytearray((folder / "rank_00001.safetensors").read_bytes())
    content[-5] ^= 4
    (folder / "rank_00001.safetensors").write_bytes(content)


def newer(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({**json.loads((folder / MANIFEST).read_text()), "format": 99}))


def edit(folder: Path) -> None:
    """Say another number of steps, as a careless hand would."""
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"step": 20', '"step": 21'))


DAMAGES = {
    "shorten": (shorten, r"rank_00001.safetensors; got \d+ bytes; expected \d+ bytes"),
    "lengthen": (lengthen, r"rank_00000.safetensors; got \d+ bytes"),
    "missing": (lambda folder: (folder / "rank_00000.safetensors").unlink(), "no such file"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "no manifest.json"),
    "empty manifest": (lambda folder: os.truncate(folder / MANIFEST, 0), "unreadable"),
    "newer": (newer, "format 99"),
    "edited": (edit, "does not match its own checksum"),
    "renamed": (lambda folder: folder.rename(folder.with_name("step_00000030")), "the manifest of step_00000020"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_letter(damage: str, save: Save, tmp_path: Path) -> None:
    save(10, data_ranks=2)
    harm, letter = DAMAGES[damage]
    harm(save(20, data_ranks=2))
    store = Store(str(tmp_path))
    found = store.scan()
    assert [checkpoint.step for checkpoint in found.complete] == [10]
    assert len(found.damaged) == 1
    with pytest.raises(CheckpointError, match=letter):
        raise found.damaged[0]
    newest = store.newest()
    assert newest is not None
    assert newest.step == 10
    name = "step_00000030" if damage == "renamed" else "step_00000020"
    with pytest.raises(CheckpointError, match=letter):  # named by the user: no older one is taken
        store.open(name)
    shutil.rmtree(tmp_path / "step_00000010")
    with pytest.raises(CheckpointError, match=letter):  # nothing whole is left: never silently from zero
        store.newest()


def test_a_name_that_is_not_there_lists_those_that_are(save: Save, tmp_path: Path) -> None:
    save(10)
    with pytest.raises(CheckpointError, match="nothing there") as caught:
        Store(str(tmp_path)).open("step_00000011")
    assert "step_00000010" in caught.value.write


def test_verify_reads_what_sizes_cannot_tell(save: Save, tmp_path: Path) -> None:
    folder = save(20, data_ranks=2)
    store = Store(str(tmp_path))
    checkpoint = store.open("step_00000020")
    store.verify(checkpoint)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not in the manifest: \['notes.txt'\]"):
        store.verify(checkpoint)
    (folder / "notes.txt").unlink()
    flip(folder)
    with pytest.raises(CheckpointError, match=r"rank_00001.safetensors; got xxh3_128"):
        store.verify(checkpoint)


# ---------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("present", "written", "rule", "left"),
    [
        ({800, 900, 1000}, 1100, {"keep_last": 2}, {1000, 1100}),
        ({800, 900, 1000}, 1100, {"keep_last": 1}, {1100}),
        ({800, 900, 1000}, 1100, {"keep_last": 1, "keep_best": [900]}, {900, 1100}),
        ({800, 900, 1000}, 1100, {"keep_last": 1, "keep_best": [7]}, {1100}),
        ({800, 900, 1000}, 1100, {"keep_last": 1, "keep_every": 400}, {800, 1100}),
        ({800, 900, 1000}, 1100, {"keep_last": 0}, {800, 900, 1000, 1100}),
        ({800, 900, 1000, 5000}, 1100, {"keep_last": 2}, {1000, 1100, 5000}),
        ({800, 900, 1000, 5000}, 1100, {"keep_last": 1}, {1100, 5000}),
        ({9, 10, 99, 100}, 1000, {"keep_last": 3}, {99, 100, 1000}),
        (set(), 5, {"keep_last": 1}, {5}),
    ],
)
def test_retention_is_set_arithmetic(present: set[int], written: int, rule: dict, left: set[int]) -> None:
    rule = {"keep_every": 0, "keep_best": [], **rule}
    assert retained(present | {written}, written, **rule) & (present | {written}) == left


def test_prune_leaves_what_retention_names(save: Save, tmp_path: Path) -> None:
    """P07, with the times of the folders reversed."""
    for step in (800, 900, 1000):
        os.utime(save(step), (5000 - step, 5000 - step))
    store = Store(str(tmp_path))
    assert store.prune(1100, keep_last=2) == []  # the successor is not there yet
    assert steps(tmp_path) == [800, 900, 1000]
    os.utime(save(1100), (1, 1))
    assert store.prune(1100, keep_last=2) == [800, 900]
    assert steps(tmp_path) == [1000, 1100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00001000", "step_00001100"]


def test_an_incomplete_one_does_not_count(save: Save, tmp_path: Path) -> None:
    for step in (800, 900, 1000):
        save(step)
    (tmp_path / "step_00001000" / "rank_00000.safetensors").unlink()
    save(1100)
    assert Store(str(tmp_path)).prune(1100, keep_last=2) == [800]
    assert steps(tmp_path) == [900, 1100]


@pytest.mark.parametrize("place", ["disk", "url"])
def test_untrained_parameters_are_written_once(place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "disk" else "memory://untrained"
    frozen = (Shard("weight", Logical.whole("base", (1000, 3)), 0, 3000, "F32"), torch.randn(3000))
    trained = (Shard("master", Logical.whole("adapter", (2, 3)), 0, 6, "F32"), torch.randn(6))
    written = {}
    for step, shards, linked in ((1, [trained, frozen], ""), (2, [trained], "step_00000001"), (3, [trained], "step_00000002")):
        job = Job(root, step, str(step), 0, 1, arrange([shard for shard, _ in shards], 0), linked=linked)
        written[step] = write_part(job, live(State(shards))).nbytes
        commit(job)
    assert written[1] > 12000 > 500 > written[2] == written[3]
    store = Store(root)
    assert store.prune(3, keep_last=1) == [1, 2]
    checkpoint = store.open("step_00000003")
    store.verify(checkpoint)
    back = torch.zeros(3000)
    load(checkpoint, [(frozen[0], back)])
    assert torch.equal(back, frozen[1])


@pytest.mark.parametrize("place", ["disk", "url"])
def test_what_is_set_aside_counts_no_more_and_is_not_lost(place: str, save: Save, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    root = str(tmp_path) if place == "disk" else "memory://set-aside"
    for step in (10, 20, 30):
        save(step, data_ranks=2, root=root)
    store = Store(root)
    kept = store.set_aside(10)
    assert [checkpoint.step for checkpoint in store.complete()] == [10]
    assert (store.scan().damaged, store.scan().unfinished) == ([], [])
    assert ["00000020" in name for name in kept] == [True, False]
    assert all(store.files.exists(f"{store.path}/{name}") for name in kept)
    save(15, root=root)
    save(25, root=root)
    assert store.prune(25, keep_last=2) == [10]
    assert store.sweep() == []
    assert all(store.files.exists(f"{store.path}/{name}") for name in kept)  # retention does not see them
    if place == "disk":
        store.verify(store.open(kept[0]))
    save(30, root=root)
    store.verify(store.open("step_00000030"))
    assert store.set_aside(30) == []


def test_a_path_means_a_checkpoint(save: Save, tmp_path: Path) -> None:
    for step in (10, 20):
        save(step, root=str(tmp_path / "run" / "checkpoints"))
    checkpoints = f"{tmp_path}/run/checkpoints"
    newest = (checkpoints, "step_00000020")
    assert find(f"{tmp_path}/run") == newest
    assert find(f"{checkpoints}/") == newest
    assert find(f"{checkpoints}/step_00000010") == (checkpoints, "step_00000010")
    assert find(f"{tmp_path}/elsewhere") is None


# ---------------------------------------------------------------- after a crash


def unfinished(save: Save, tmp_path: Path, mark: dict | None, keep_manifest: bool = False) -> Path:
    """A folder as a save of step 20 leaves it that was killed on the way."""
    folder = save(20).rename(tmp_path / ".tmp-step_00000020-a")
    if not keep_manifest:
        (folder / MANIFEST).unlink()
    if mark is not None:
        (folder / "rank_00000.writing").write_text(json.dumps(mark))
    return folder


def test_sweep_takes_away_what_the_dead_left(save: Save, tmp_path: Path) -> None:
    save(10)
    unfinished(save, tmp_path, {**owner(os.getpid()), "start": "1"})  # our pid, but another process
    shutil.copytree(tmp_path / "step_00000010", tmp_path / ".trash-step_00000005-x")
    assert Store(str(tmp_path)).scan().unfinished == [".tmp-step_00000020-a", ".trash-step_00000005-x"]
    assert Store(str(tmp_path)).sweep() == [".tmp-step_00000020-a", ".trash-step_00000005-x"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


def test_sweep_leaves_the_living_alone(save: Save, tmp_path: Path) -> None:
    folder = unfinished(save, tmp_path, owner(os.getpid()))
    assert Store(str(tmp_path)).sweep() == []
    assert folder.exists()


def test_sweep_asks_the_clock_about_other_hosts(save: Save, tmp_path: Path) -> None:
    folder = unfinished(save, tmp_path, {"host": "elsewhere", "pid": 1, "start": "1"})
    assert Store(str(tmp_path)).sweep() == []
    long_ago = time.time() - ABANDONED_S - 1
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert Store(str(tmp_path)).sweep() == [folder.name]
    assert not folder.exists()


def test_sweep_finishes_what_lacked_only_its_name(save: Save, tmp_path: Path) -> None:
    unfinished(save, tmp_path, {**owner(os.getpid()), "start": "1"}, keep_manifest=True)
    store = Store(str(tmp_path))
    assert store.complete() == []
    store.sweep()
    assert steps(tmp_path) == [20]
    store.verify(store.complete()[0])


def test_a_step_can_be_saved_again(save: Save, tmp_path: Path) -> None:
    save(10)
    save(10, data_ranks=2)
    assert [len(checkpoint.manifest.files) for checkpoint in Store(str(tmp_path)).complete()] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]


# ---------------------------------------------------------------- behind a URL


def test_the_same_rules_hold_behind_a_url(save: Save) -> None:
    root = "memory://bucket/the-same-rules"
    store = Store(root)
    assert store.newest() is None
    for step in (800, 900, 1000):
        save(step, data_ranks=2, root=root)
    for checkpoint in store.complete():
        store.verify(checkpoint)
    store.files.rm_file(f"{store.path}/step_00001000/{MANIFEST}")
    assert store.scan().unfinished == ["step_00001000"]
    save(1100, data_ranks=4, root=root)
    save(1100, data_ranks=2, root=root)  # again, on fewer ranks: nothing of the four is left
    store.verify(store.open("step_00001100"))
    assert store.prune(1100, keep_last=2) == [800]
    assert [checkpoint.step for checkpoint in store.complete()] == [900, 1100]
    assert store.scan().unfinished == []
    assert not store.files.exists(f"{store.path}/step_00000800")
    store.files.pipe_file(f"{store.path}/step_00000900/rank_00000.safetensors", b"short")
    assert [checkpoint.step for checkpoint in store.complete()] == [1100]
    assert "5 bytes" in str(store.scan().damaged[0])


def test_a_url_that_nobody_can_open_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nonsense"):
        Store("nonsense://bucket/run")


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = free_bytes(str(tmp_path / "a" / "b"))
    assert 0 < found <= shutil.disk_usage(tmp_path).total

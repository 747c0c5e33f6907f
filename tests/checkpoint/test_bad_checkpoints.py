"""Bad checkpoints, full disks and folders that cannot be written, as a start of the trainer meets them: one letter, the right code.

An older checkpoint is taken only where the user did not name one, it is said, and no start begins silently from zero.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import runs
from tests.starts import assert_one_letter

WORDS = [*runs.PLAIN, "checkpoint=sync", "checkpoint.every=2", "checkpoint.keep_last=0", "model.dropout=0.1"]
SHARD = "rank_00000.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, and one of six that nobody stopped."""
    root = tmp_path_factory.mktemp("trained")
    runs.train([*WORDS, "steps=4"], root)
    runs.train([*WORDS, "steps=6", "name=straight", "checkpoint=none"], root)
    return root


@pytest.fixture
def here(trained: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))


# ---------------------------------------------------------------- damage


def truncate(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


def flip(name: str, folder: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


def flip_header(folder: Path) -> None:
    """One bit of the JSON in which a safetensors file says what it holds."""
    content = bytearray((folder / SHARD).read_bytes())
    content[12] ^= 1
    (folder / SHARD).write_bytes(content)


def newer(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({**runs.manifest(folder), "format": 99}))


def name_a_file(name: str, folder: Path) -> None:
    """A manifest, otherwise as it was, whose file has another name; made by hand, so its checksum is wrong."""
    body = runs.manifest(folder)
    body["files"][0]["name"] = name
    (folder / "manifest.json").write_text(json.dumps(body))


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated by a byte": (truncate, [SHARD, "bytes"]),
    "a flipped bit": (partial(flip, SHARD), [SHARD, "xxh3_128"]),
    "a flipped bit in the header": (flip_header, [SHARD]),
    "missing": (lambda folder: (folder / SHARD).unlink(), [SHARD, "no such file"]),
    "empty": (lambda folder: os.truncate(folder / SHARD, 0), [SHARD, "0 bytes"]),
    "a file too many": (lambda folder: (folder / "notes.txt").write_text("mine"), ["notes.txt"]),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), ["no manifest.json"]),
    "an empty manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), ["manifest.json", "unreadable"]),
    "a flipped bit in the manifest": (partial(flip, "manifest.json"), ["manifest.json"]),
    "a newer manifest": (newer, ["manifest.json", "format 99"]),
    "a manifest that names a file elsewhere": (partial(name_a_file, "/etc/passwd"), ["manifest.json"]),
    "another step than its name": (lambda folder: folder.rename(folder.with_name("step_00000005")), ["step_00000004"]),
}

# Always one of each kind: seen by its size, its checksum, the list of files, the manifest.
FAST = {"truncated by a byte", "a flipped bit", "a file too many", "a newer manifest"}
EACH = [damage if damage in FAST else pytest.param(damage, marks=pytest.mark.slow) for damage in DAMAGES]


@pytest.mark.parametrize("damage", EACH)
def test_the_older_one_is_taken_where_the_user_named_none(damage: str, here: Path) -> None:
    harm, parts = DAMAGES[damage]
    run = here / "runs/run"
    harm(run / "checkpoints/step_00000004")
    runs.train([*WORDS, "steps=6"], here)
    (resumed,) = runs.events(run, "resume")
    assert resumed["step"] == 2
    (letter,) = resumed["passed_over"]
    for part in parts:
        assert part in letter
    assert runs.same_steps(runs.losses(run), runs.losses(here / "runs/straight"))
    assert max(runs.losses(run)) == 6


@pytest.mark.parametrize("damage", EACH)
def test_the_one_that_the_user_named_is_refused(damage: str, here: Path) -> None:
    harm, parts = DAMAGES[damage]
    folder = here / "runs/run/checkpoints/step_00000004"
    harm(folder)
    named = folder if folder.exists() else folder.with_name("step_00000005")
    said = runs.train([*WORDS, "steps=6", "name=other", f"resume={named}"], here, code=2)
    assert_one_letter(said, *parts)
    assert not runs.losses(here / "runs/other")


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_where_all_are_damaged_nothing_begins_from_zero(resume: str, here: Path) -> None:
    run = here / "runs/run"
    truncate(run / "checkpoints/step_00000004")
    flip(SHARD, run / "checkpoints/step_00000002")
    before = runs.losses(run)
    said = runs.train([*WORDS, "steps=6", f"resume={resume}"], here, code=2)
    assert_one_letter(said, "checkpoints of runs/run", SHARD, "resume=never")
    assert runs.losses(run) == before
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_00000002", "step_00000004"}


# ---------------------------------------------------------------- another model


OTHERS = {
    "wider": ("model.ffn_hidden_size", "64", "96"),
    "deeper": ("model.num_layers", "2", "3"),
    "shallower": ("model.num_layers", "2", "1"),
    "untied": ("model.tie_embeddings", "True", "False"),
}


@pytest.mark.parametrize("other", ["shallower", "wider", *(pytest.param(other, marks=pytest.mark.slow) for other in ("deeper", "untied"))])
def test_a_checkpoint_of_another_model_is_refused_even_if_changes_are_allowed(other: str, here: Path) -> None:
    key, old, new = OTHERS[other]
    words = [*WORDS, f"{key}={new}", "steps=6", "name=other", "resume=runs/run/checkpoints/step_00000004"]
    said = runs.train(words, here, code=2)
    assert_one_letter(said, f"{key}: {old} there, {new} now", "resume_changes=allow")
    said = runs.train([*words, "resume_changes=allow"], here, code=2)
    assert_one_letter(said, "another model")
    assert not runs.losses(here / "runs/other")


# ---------------------------------------------------------------- a disk that refuses


def limit_files() -> None:
    """A disk that is full after 20,000 bytes of a file: less than a State, more than anything else that a run writes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_ends_the_run_and_leaves_the_older_checkpoints(here: Path) -> None:
    run = here / "runs/run"
    said = runs.train([*WORDS, "steps=6"], here, code=1, prepare=limit_files)
    assert_one_letter(said, "checkpoint of step 6", "File too large", "room for")
    assert runs.facts(run)["status"] == "failed"
    assert runs.whole_steps(run / "checkpoints") == [2, 4]
    runs.train([*WORDS, "steps=6"], here)  # there is room again
    assert [resumed["step"] for resumed in runs.events(run, "resume")] == [4, 4]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_{step:08d}" for step in (2, 4, 6)}
    assert runs.losses(run) == runs.losses(here / "runs/straight")


CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
PR_CAPBSET_DROP = 24
CAPABILITY_VERSION_3 = 0x20080522


def obey_permissions() -> None:
    """Have permission bits bind this process and its children, also where the tests run as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        return
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    for word in range(3):  # effective, permitted, inheritable
        data[word] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_folder_that_may_only_be_read(mode: str, here: Path) -> None:
    checkpoints = here / "runs/run/checkpoints"
    checkpoints.chmod(0o555)
    try:
        said = runs.train([*WORDS, f"checkpoint={mode}", "steps=6"], here, code=1, prepare=obey_permissions)
    finally:
        checkpoints.chmod(0o755)
    assert_one_letter(said, "checkpoint of step 6", "Permission denied", "right to write")
    assert runs.whole_steps(checkpoints) == [2, 4]
    assert runs.facts(here / "runs/run")["status"] == "failed"

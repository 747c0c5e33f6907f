"""A checkpoint whose damage only its checksum shows: found while it is loaded, passed over, and nothing of it is trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import runs
from tests.marks import slow

WORDS = [*runs.SMALL, "zero=stage1", "precision=fp32", "checkpoint=sync", "checkpoint.keep_last=0", "checkpoint.every=2"]


def flip(folder: Path, rank: int) -> None:
    """Change one bit in the last tensor of a rank's file; its size and the manifest stay as they are."""
    path = folder / f"rank_{rank:05d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


@pytest.mark.slow
def test_a_flipped_bit_in_one_ranks_file(tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=4"], tmp_path, ranks=2)
    run = tmp_path / "runs" / "run"
    shutil.copytree(run, run.with_name("sound"))
    flip(run / "checkpoints" / "step_00000004", rank=1)

    runs.train([*WORDS, "steps=6"], tmp_path, ranks=2)
    runs.train([*WORDS, "steps=6", "name=sound"], tmp_path, ranks=2)
    resumed = runs.events(run, "resume")[0]
    assert resumed["step"] == 2
    assert "rank_00001.safetensors" in str(resumed["passed_over"])
    assert "xxh3_128" in str(resumed["passed_over"])
    assert runs.losses(run) == runs.losses(run.with_name("sound"))  # steps 3 and 4 were done again, from the older state


@pytest.mark.slow
def test_a_damaged_checkpoint_that_was_named_is_refused(tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=4"], tmp_path, ranks=2)
    named = tmp_path / "runs" / "run" / "checkpoints" / "step_00000004"
    flip(named, rank=0)
    text = runs.train([*WORDS, "steps=6", f"resume={named}"], tmp_path, ranks=2, code=2)
    assert "rank_00000.safetensors" in text
    assert "take an older checkpoint" in text


@pytest.mark.parametrize("resume", ["auto", slow("must")])
def test_where_every_checkpoint_is_damaged_nothing_starts_from_zero(resume: str, tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=4"], tmp_path, ranks=2)
    run = tmp_path / "runs" / "run"
    for step in (2, 4):
        flip(run / "checkpoints" / f"step_{step:08d}", rank=1)
    text = runs.train([*WORDS, "steps=6", f"resume={resume}"], tmp_path, ranks=2, code=2)
    assert "resume=never" in text
    assert max(runs.losses(run)) == 4

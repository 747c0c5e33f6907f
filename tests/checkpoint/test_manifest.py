"""The format on disk: read by the safetensors library, and by us after every possible flipped bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from framework.checkpoint.buffers import live
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.manifest import File, Manifest, arrange, step_name, step_of
from framework.checkpoint.save import Job, write_part
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import DTYPES, State


def mixed_state() -> State:
    """Shards of every item size, in an order that is bad for alignment, one of them not trained and one empty."""
    shards = []
    for at, dtype in enumerate(("U8", "BF16", "F32", "I64", "F16")):
        logical = Logical.whole(f"layer.{at}", (5 + at, 3))
        values = torch.arange(1 + 3 * at, 1 + 3 * at + 7).to(DTYPES[dtype])
        shards.append((Shard("weight" if dtype == "F16" else "master", logical, at, 7, dtype), values))
    shards.append((Shard("exp_avg", logical, 0, 0, "F32"), torch.empty(0)))
    return State(shards)


def test_files_are_safetensors(tmp_path: Path) -> None:
    state = mixed_state()
    files = arrange([shard for shard, _ in state.shards], 3)
    assert [plan.name for plan in files] == ["rank_00003.safetensors", "weights_00003.safetensors"]
    write_part(Job(str(tmp_path), 1, "a", 3, 4, files), live(state))
    kept = {}
    for plan in files:
        path = next(tmp_path.iterdir()) / plan.name
        with safe_open(path, "pt") as opened:
            kept.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert kept.keys() == {shard.key for shard, _ in state.shards if shard.length}
    for shard, tensor in state.shards:
        if shard.length:
            assert torch.equal(kept[shard.key], tensor)
            assert kept[shard.key].dtype == tensor.dtype


def manifest() -> Manifest:
    files = [File("rank_00000.safetensors", 100, "00ff" * 8, 88, [["master", "a", [0], [3], 0, 3, "F32"]], {"a": [3]})]
    small = {"loss": [1e-5, math.inf], "name": "résumé \\ \n", 2: "two", 10: None}
    return Manifest(7, "x", files, small, [{"rng": "00"}])


def test_manifest_round_trip() -> None:
    back = Manifest.decode(manifest().encode(), "here")
    assert (back.step, back.attempt, back.files, back.local) == (7, "x", manifest().files, [{"rng": "00"}])
    assert back.small == {"loss": [1e-5, math.inf], "name": "résumé \\ \n", "2": "two", "10": None}
    assert [(piece.at, piece.shard.length) for piece in back.files[0].pieces()] == [(88, 3)]


def test_no_flipped_bit_changes_what_a_manifest_says() -> None:
    content = manifest().encode()
    whole = Manifest.decode(content, "here")
    refused = 0
    for at in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            try:
                assert Manifest.decode(bytes(flipped), "here") == whole  # e against E in a number or an escape
            except CheckpointError:
                refused += 1
    assert refused > 7.9 * len(content)


def test_a_newer_format_is_refused_by_name() -> None:
    newer = json.dumps({**json.loads(manifest().encode()), "format": 2, "surprise": []}).encode()
    with pytest.raises(CheckpointError, match=r"format 2(.|\n)*format 1"):
        Manifest.decode(newer, "here")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe"])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="unreadable"):
        Manifest.decode(content, "here")


def test_step_names() -> None:
    assert [step_name(0), step_name(10), step_name(123456789)] == ["step_00000000", "step_00000010", "step_123456789"]
    assert [step_of(name) for name in ("step_00000010", "step_123456789", "step_10", ".tmp-step_00000010-a", "step_00000010.bak")] == [
        10, 123456789, None, None, None,
    ]  # fmt: skip

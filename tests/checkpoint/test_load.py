"""Loading under another layout than saving: every element is where the logical tensor has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from framework.checkpoint.buffers import live
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.load import load
from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import Job, commit, write_part
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import DTYPES, State
from framework.checkpoint.store import Checkpoint, Store
from tests.checkpoint.layouts import state_of

Save = Callable[..., Path]
LAYOUTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1)]


def opened(root: Path | str, step: int) -> Checkpoint:
    return Store(str(root)).open(f"step_{step:08d}")


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("place", ["disk", "url"])
def test_every_layout_loads_every_other(saved: tuple[int, int], place: str, save: Save, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    root = str(tmp_path) if place == "disk" else f"memory://layouts/{saved}"
    save(1, *saved, root=root)
    checkpoint = opened(root, 1)
    for wanted in LAYOUTS:
        for rank in range(wanted[0] * wanted[1]):
            expected = state_of(tensors, *wanted, rank).shards
            # Padding is -1 there, and has to be left alone.
            filled = [(shard, torch.full_like(tensor, -1.0 if shard.kind == "master" else -2.0)) for shard, tensor in expected]
            load(checkpoint, filled)
            for (shard, want), (_, got) in zip(expected, filled, strict=True):
                assert torch.equal(got, want), (wanted, rank, shard)


def saved_tensor(root: Path, tensor: Tensor, dtype: str) -> tuple[Checkpoint, Shard]:
    shard = Shard("exp_avg", Logical.whole("t", tuple(tensor.shape)), 0, tensor.numel(), dtype)
    state = State([(shard, tensor.flatten())])
    job = Job(str(root), 1, "a", 0, 1, arrange([shard], 0))
    write_part(job, live(state))
    commit(job)
    return opened(root, 1), shard


@pytest.mark.parametrize(("kept", "wanted"), [("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"), ("I64", "F32")])
def test_the_dtype_may_change(kept: str, wanted: str, tmp_path: Path) -> None:
    values = torch.arange(-12, 12).reshape(4, 6).to(DTYPES[kept])
    checkpoint, shard = saved_tensor(tmp_path, values, kept)
    target = torch.zeros(24, dtype=DTYPES[wanted])
    load(checkpoint, [(shard, target)])
    assert target.tolist() == [float(number) for number in range(-12, 12)]


def test_a_view_into_a_larger_buffer_is_filled_and_nothing_beside_it(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(4, 6)
    checkpoint, _ = saved_tensor(tmp_path, values, "F32")
    buffer = torch.full((40,), -1.0)
    right = Logical("t", (4, 6), (0, 3), (4, 3))  # the right half of every row: a strided block
    load(checkpoint, [(Shard("exp_avg", right, 1, 11, "F32"), buffer[7:18])])
    assert buffer[7:18].tolist() == values[:, 3:].flatten()[1:].tolist()
    assert (buffer[:7] == -1).all()
    assert (buffer[18:] == -1).all()


def test_only_what_is_needed_is_read(save: Save, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save(1, 2, 2)
    shards = [(shard, torch.zeros_like(tensor)) for shard, tensor in state_of(tensors, 1, 3, 1).shards]
    assert load(opened(tmp_path, 1), shards) == sum(shard.nbytes for shard, _ in shards)


def test_a_parameter_that_requires_a_gradient_is_filled(tmp_path: Path) -> None:
    checkpoint, shard = saved_tensor(tmp_path, torch.ones(2, 3), "F32")
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    load(checkpoint, [(shard, parameter.view(-1))])
    assert parameter.sum().item() == 6


def test_another_model_is_refused_before_anything_is_changed(save: Save, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save(1, 1, 2)
    good = [(shard, torch.zeros_like(tensor)) for shard, tensor in state_of(tensors, 1, 1, 0).shards]
    for name, shape, letter in (("embed.weight", (8, 3), r"shape \[7, 3\]"), ("layers.9.weight", (4, 6), "another model")):
        other = Shard("master", Logical.whole(name, shape), 0, shape[0] * shape[1], "F32")
        with pytest.raises(CheckpointError, match=letter):
            load(opened(tmp_path, 1), [*good, (other, torch.zeros(other.length))])
    assert all((tensor == 0).all() for _, tensor in good)


def test_a_file_cut_after_it_was_looked_at_is_refused(tmp_path: Path) -> None:
    checkpoint, shard = saved_tensor(tmp_path, torch.ones(2, 3), "F32")
    path = Path(checkpoint.path) / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="end of the file"):
        load(checkpoint, [(shard, torch.zeros(6))])


def flipped(checkpoint: Checkpoint, at: int) -> None:
    path = Path(checkpoint.path) / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("wanted", [(1, 1), (1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("place", ["disk", "url"])
def test_a_checked_load_of_any_layout_fills_as_an_unchecked_one(
    wanted: tuple[int, int], place: str, save: Save, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    root = str(tmp_path) if place == "disk" else f"memory://checked/{wanted}"
    save(1, 1, 2, root=root)
    checkpoint = opened(root, 1)
    for rank in range(wanted[0] * wanted[1]):
        shards = [(shard, torch.full_like(tensor, -7.0)) for shard, tensor in state_of(tensors, *wanted, rank).shards]
        plain = [(shard, tensor.clone()) for shard, tensor in shards]
        load(checkpoint, shards, checkpoint.manifest.files)
        load(checkpoint, plain)
        assert all(torch.equal(mine, other) for (_, mine), (_, other) in zip(shards, plain, strict=True))


@pytest.mark.parametrize("at", [3, 60, -1, -2_000_000])
@pytest.mark.parametrize("part", ["all", "right half", "nothing"])
def test_a_flipped_bit_is_found_wherever_it_is_and_whatever_is_read(at: int, part: str, tmp_path: Path) -> None:
    """In the header, in what is loaded and in what is not; the file is several chunks long."""
    checkpoint, whole = saved_tensor(tmp_path, torch.arange(900_000.0).reshape(900, 1000), "F32")
    right = Shard("exp_avg", Logical("t", (900, 1000), (0, 500), (900, 500)), 0, 450_000, "F32")
    shards = {"all": [whole], "right half": [right], "nothing": []}[part]
    filled = [(shard, torch.zeros(shard.length)) for shard in shards]
    load(checkpoint, filled, checkpoint.manifest.files)
    flipped(checkpoint, at)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors; got xxh3_128 \w+; expected xxh3_128"):
        load(checkpoint, filled, checkpoint.manifest.files)
    load(checkpoint, filled)  # another rank has this file in its share


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_the_shares_of_all_ranks_are_all_files_once(readers: int, save: Save, tmp_path: Path) -> None:
    save(1, 1, 3)
    manifest = opened(tmp_path, 1).manifest
    shares = [[file.name for file in manifest.share(rank, readers)] for rank in range(readers)]
    assert sorted(name for share in shares for name in share) == sorted(file.name for file in manifest.files)
    if readers == 3:
        assert shares == [[f"rank_0000{rank}.safetensors"] for rank in range(3)]

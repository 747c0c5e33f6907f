"""Rounded moments: the error that scaling.py promises, against float64, and under every layout."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from framework.checkpoint import scaling
from framework.checkpoint.buffers import Buffers, live
from framework.checkpoint.load import load
from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import Job, commit, write_part
from framework.checkpoint.scaling import BLOCK, halve, pack, unpack
from framework.checkpoint.shards import Logical, Shard, from_row, to_row
from framework.checkpoint.state import State
from framework.checkpoint.store import Store
from tests.checkpoint.layouts import state_of

BITS = {"BF16": 8, "F16": 11}
"""Bits of the significand, the leading one included."""
REACH = {"BF16": 140, "F16": 28}
"""Elements within 2^-REACH of the block's largest have the type's full precision."""


def moment(values: Tensor, kind: str = "exp_avg") -> tuple[Shard, Tensor]:
    return Shard(kind, Logical.whole("t", (len(values),)), 0, len(values), "F32"), values


def there_and_back(values: Tensor, dtype: str, kind: str = "exp_avg") -> np.ndarray:
    parts = [unpack(shard, pack(shard, tensor)) for shard, tensor in halve([moment(values, kind)], dtype)]
    return torch.cat(parts).double().numpy()


def spread(largest: float, powers: int, sign: bool, seed: int) -> Tensor:
    """Magnitudes from `largest` down to 2^-powers of it, evenly in their exponent."""
    draw = np.random.default_rng(seed)
    values = largest * 2.0 ** (-powers * draw.random(4000)) * (draw.choice([-1.0, 1.0], 4000) if sign else 1.0)
    values[7] = largest
    return torch.from_numpy(values.astype(np.float32))


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """To the nearest number of `bits` significant bits, ties to even."""
    part, power = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(part, bits)), power - bits)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("largest", [1e-25, 3e-9, 1.0, 1.999999, 700.0, 1e30])
def test_the_error_is_what_is_stated(dtype: str, largest: float) -> None:
    values = spread(largest, 60, sign=True, seed=1)
    exact, got = values.double().numpy(), there_and_back(values, dtype)
    a = np.abs(exact).max()
    near = np.abs(exact) >= 2.0 ** -REACH[dtype] * a
    assert 100 < near.sum() <= len(exact)
    error = (np.abs(got - exact) / np.abs(exact))[near].max()
    assert 0.9 * 2.0 ** -BITS[dtype] < error <= 2.0 ** -BITS[dtype]
    assert np.array_equal(got[near], rounded(exact, BITS[dtype])[near])
    assert (np.abs(got - exact)[~near] <= 2.0**-39 * a).all()


@pytest.mark.parametrize("dtype", BITS)
def test_a_second_moment_never_becomes_zero(dtype: str) -> None:
    values = spread(1e-3, 110, sign=False, seed=2)
    values[::5] = 0
    exact, got = values.double().numpy(), there_and_back(values, dtype, "exp_avg_sq")
    assert (got >= 0).all()
    assert np.array_equal(got == 0, exact == 0)
    lost = there_and_back(values, dtype, "exp_avg") == 0
    if dtype == "F16":
        assert (lost & (exact > 0)).sum() > 1000  # what the rule is there for
        assert (got[lost & (exact > 0)] >= exact[lost & (exact > 0)]).all()
    assert (np.abs(got - exact) <= np.maximum(2.0 ** -BITS[dtype] * exact, 2.0**-38 * exact.max())).all()


@pytest.mark.parametrize("dtype", BITS)
def test_extreme_blocks(dtype: str) -> None:
    assert not there_and_back(torch.zeros(5), dtype).any()
    tiny = torch.tensor([2.0**-149, 2.0**-140, 2.0**-130])
    assert np.abs(there_and_back(tiny, dtype) - tiny.double().numpy()).max() <= 2.0**-136
    assert np.isfinite(there_and_back(torch.tensor([3e38, -1e38]), dtype)).all()
    broken = there_and_back(torch.tensor([1.0, torch.inf, torch.nan]), dtype)
    assert broken[0] == 1
    assert broken[1] == np.inf
    assert np.isnan(broken[2])


def test_only_moments_are_cut_and_nothing_is_copied() -> None:
    long = torch.randn(2 * BLOCK + 3)
    master, first = (Shard("master", Logical.whole("t", (9,)), 0, 9, "F32"), torch.randn(9)), moment(long)
    kept = halve([master, first], "BF16")
    assert kept[0] == master
    assert [(shard.start, shard.length) for shard, _ in kept[1:]] == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, 3)]
    assert {shard.dtype for shard, _ in kept[1:]} == {"BF16"}
    assert [tensor.data_ptr() for _, tensor in kept[1:]] == [long.data_ptr() + 4 * shard.start for shard, _ in kept[1:]]
    assert sum(shard.nbytes for shard, _ in kept[1:]) == 2 * len(long)


def test_a_row_keeps_the_scale() -> None:
    for scale in (0, -7, 99):
        shard = Shard("exp_avg", Logical.whole("t", (4, 6)), 3, 5, "F16", scale)
        assert from_row(to_row(shard), {"t": [4, 6]}) == shard


LAYOUTS = [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "BLOCK", 5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_rounded_moments_load_under_every_layout(saved: tuple[int, int], dtype: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors = {name: tensor * 10.0 ** (3 * at - 4) for at, (name, tensor) in enumerate(tensors.items())}
    ranks, jobs = saved[0] * saved[1], []
    for rank in range(ranks):
        state = State(halve(state_of(tensors, *saved, rank).shards, dtype))
        jobs.append(Job(str(tmp_path), 1, "a", rank, ranks, arrange([shard for shard, _ in state.shards], rank)))
        write_part(jobs[-1], live(state))
    commit(jobs[0])
    checkpoint = Store(str(tmp_path)).open("step_00000001")
    assert len({piece.shard.scale for pieces in checkpoint.pieces.values() for piece in pieces}) > 2
    for wanted in LAYOUTS:
        for rank in range(wanted[0] * wanted[1]):
            expected = state_of(tensors, *wanted, rank).shards
            filled = [(shard, torch.full_like(tensor, -1.0 if shard.kind == "master" else -2.0)) for shard, tensor in expected]
            load(checkpoint, filled)
            for (shard, want), (_, got) in zip(expected, filled, strict=True):
                exact = want.double().numpy()
                kept = exact if shard.kind == "master" else rounded(exact, BITS[dtype])
                assert np.array_equal(got.double().numpy(), kept), (wanted, shard)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", BITS)
def test_both_kinds_of_saves_write_the_same_bytes(dtype: str, tensors: dict[str, Tensor]) -> None:
    memory = os.memfd_create("test")
    held = Buffers(memory)
    for factor in (1.0, 1e-6):  # the second time with other scales
        state = State(halve([(shard, tensor * factor) for shard, tensor in state_of(tensors, 1, 1, 0).shards], dtype))
        files = arrange([shard for shard, _ in state.shards], 0)
        held.copy(state, files)
        held.wait()
        assert [os.pread(memory, plan.nbytes, plan.start) for plan in files] == [b"".join(live(state)(plan)) for plan in files]
    os.close(memory)

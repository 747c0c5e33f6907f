"""Shards, boxes and overlaps against numpy's own indexing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
import pytest

from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.shards import Copy, Logical, Piece, Shard, boxes, equal_parts, from_row, index, overlaps, to_row


def shard(logical: Logical, start: int, length: int) -> Shard:
    return Shard("master", logical, start, length, "F32")


# ---------------------------------------------------------------- boxes


def every_small_local() -> Iterator[Logical]:
    """Local tensors of up to three axes somewhere in a logical one, some reaching beyond it on axis 0."""
    yield Logical.whole("scalar", ())
    for axes in (1, 2, 3):
        for size in product((1, 2, 3), repeat=axes):
            for before, after in ((0, 0), (2, 1), (0, -1), (2, -2), (1, -3)):
                shape = (max(1, size[0] + before + after), *(n + 2 for n in size[1:]))
                yield Logical("t", shape, (before, *(1 for _ in size[1:])), size)


def shifted(offset: tuple[int, ...], point: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offset, point, strict=True))


def test_boxes_are_exactly_the_elements_of_a_flat_range() -> None:
    count = 0
    for logical in every_small_local():
        total = prod(logical.size)
        # Logical coordinates of each flat local element, from numpy.
        coordinates = [shifted(logical.offset, point) for point in np.ndindex(*logical.size)]
        kept = [all(c < n for c, n in zip(point, logical.shape, strict=True)) for point in coordinates]
        for start in range(total + 1):
            for length in range(total - start + 1):
                found = boxes(shard(logical, start, length))
                got = {}
                for box in found:
                    for at, point in enumerate(shifted(box.offset, inner) for inner in np.ndindex(*box.size)):
                        assert point not in got
                        got[point] = box.source + at
                wanted = range(start, start + length)
                assert got == {coordinates[flat]: flat - start for flat in wanted if kept[flat]}
                assert len(found) <= max(1, 2 * len(logical.size) - 1)
                count += 1
    assert count > 5000


def test_a_range_outside_its_local_tensor_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        boxes(shard(Logical.whole("t", (4,)), 2, 3))


# ---------------------------------------------------------------- overlaps


def layout(shape: tuple[int, ...], axis: int, model_ranks: int, data_ranks: int) -> list[Shard]:
    """All shards of a tensor split on `axis` (axis 0 padded to a multiple) and then flat over data ranks."""
    width = -(-shape[axis] // model_ranks)
    found = []
    for rank in range(model_ranks):
        offset = tuple(width * rank if a == axis else 0 for a in range(len(shape)))
        size = tuple(width if a == axis else n for a, n in enumerate(shape))
        for part in range(data_ranks):
            found.append(shard(Logical("t", shape, offset, size), *equal_parts(prod(size), data_ranks, part)))
    return found


def flat(values: np.ndarray, piece: Shard) -> np.ndarray:
    """The shard's elements cut out of the whole tensor; padding is -1."""
    logical = piece.logical
    room = np.full([max(n, o + s) for n, o, s in zip(logical.shape, logical.offset, logical.size, strict=True)], -1.0)
    room[tuple(slice(n) for n in logical.shape)] = values
    local = room[tuple(slice(o, o + s) for o, s in zip(logical.offset, logical.size, strict=True))]
    return local.reshape(-1)[piece.start : piece.start + piece.length].copy()


def apply(copy: Copy, source: np.ndarray, target: np.ndarray) -> None:
    """numpy's reading of a strided block; raises where it leaves its array."""

    def block(array: np.ndarray, start: int, strides: tuple[int, ...]) -> np.ndarray:
        last = start + sum((n - 1) * s for n, s in zip(copy.size, strides, strict=True))
        assert 0 <= start <= last < array.size
        return np.lib.stride_tricks.as_strided(array[start:], copy.size, [s * array.itemsize for s in strides])

    block(target, copy.target, copy.target_strides)[...] = block(source, copy.source, copy.source_strides)


def random_layout(shape: tuple[int, ...], draw: random.Random) -> list[Shard]:
    axis = draw.choice([0] + [a for a in range(1, len(shape)) if shape[a] % 2 == 0])
    return layout(shape, axis, draw.choice([1, 2, 3] if axis == 0 else [1, 2]), draw.choice([1, 2, 3, 4, 7]))


@pytest.mark.parametrize("shape", [(1,), (13,), (7, 6), (8, 4), (1, 10), (3, 4, 6), (2, 3, 4, 2)])
def test_any_layout_fills_any_other(shape: tuple[int, ...]) -> None:
    draw = random.Random(str(shape))
    values = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    for _ in range(60):
        present = [Piece("file", at, piece) for at, piece in enumerate(random_layout(shape, draw))]
        draw.shuffle(present)
        for needed in random_layout(shape, draw):
            got = np.full(needed.length, -1.0)
            copies = overlaps(needed, present)
            for copy in copies:
                apply(copy, flat(values, copy.piece.shard), got)
            np.testing.assert_array_equal(got, flat(values, needed))
            assert sum(prod(copy.size) for copy in copies) == (got >= 0).sum()  # each element once


def test_replicas_are_read_once() -> None:
    needed = shard(Logical.whole("t", (4, 4)), 3, 10)
    present = [Piece("a", 0, shard(needed.logical, 0, 9)), Piece("b", 0, shard(needed.logical, 5, 11)), Piece("c", 0, needed)]
    assert sum(prod(copy.size) for copy in overlaps(needed, present)) == 10


def test_row_split_into_column_split_is_one_block_for_each_pair() -> None:
    by_rows = [Piece("f", at, piece) for at, piece in enumerate(layout((512, 512), 0, 4, 1))]
    for needed in layout((512, 512), 1, 4, 1):
        copies = overlaps(needed, by_rows)
        assert [copy.size for copy in copies] == [(128, 128)] * 4
    whole = overlaps(shard(Logical.whole("t", (512, 512)), 0, 512 * 512), by_rows)
    assert all(copy.is_run for copy in whole)


def test_what_is_not_there_is_said() -> None:
    needed = shard(Logical.whole("t", (4, 4)), 0, 16)
    with pytest.raises(CheckpointError, match="4 of 16 elements are in no file"):
        overlaps(needed, [Piece("a", 0, shard(needed.logical, 0, 12))])
    with pytest.raises(CheckpointError, match=r"shape \[4, 5\]"):
        overlaps(needed, [Piece("a", 0, shard(Logical.whole("t", (4, 5)), 0, 20))])
    with pytest.raises(CheckpointError, match="another model"):
        overlaps(needed, [])


# ---------------------------------------------------------------- small things


@pytest.mark.parametrize("length", [0, 1, 5, 12, 13])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_equal_parts_tile_the_whole(length: int, parts: int) -> None:
    ranges = [equal_parts(length, parts, at) for at in range(parts)]
    assert [i for start, count in ranges for i in range(start, start + count)] == list(range(length))
    sizes = [count for _, count in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_rows_and_keys() -> None:
    first = Shard("exp_avg", Logical("a", (9, 4), (3, 0), (3, 4)), 2, 5, "BF16")
    assert from_row(to_row(first), {"a": [9, 4]}) == first
    assert first.nbytes == 10
    second = Shard("exp_avg", first.logical, 7, 5, "BF16")
    assert first.key != second.key
    assert index([Piece("f", 0, first), Piece("g", 0, second)]) == {("exp_avg", "a"): [Piece("f", 0, first), Piece("g", 0, second)]}

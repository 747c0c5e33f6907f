"""Which elements of which logical tensor a piece of memory holds, and how pieces of one layout are filled from another.

Integers and dtype names only: no torch, no files.

A logical tensor is whole and unpadded. A rank keeps a box of it as its local tensor (tensor parallelism), and of that
a flat, row-major range (ZeRO, or a share of a replica): a `Shard`. A flat range of an N-dimensional box is at most
2N - 1 smaller boxes (of a matrix: rest of a row, whole rows, start of a row), and two layouts meet where boxes overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from framework.checkpoint.errors import CheckpointError

Ints = tuple[int, ...]
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Logical:
    """Where a rank's local tensor lies in the whole logical tensor; all in elements.

    The local tensor has shape `size` and begins at `offset`. Along axis 0 it may reach beyond `shape` (a padded
    vocabulary); what lies beyond is padding and is never kept. `primary` is False for a replica that another tensor rank writes.
    """

    name: str
    shape: Ints
    offset: Ints
    size: Ints
    primary: bool = True

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Logical:
        return cls(name, tuple(shape), (0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Shard:
    """The flat elements [start, start + length) of a local tensor.

    `kind` says what of the parameter it is: master, exp_avg, exp_avg_sq, momentum, or weight (a parameter that is not
    trained). `dtype` is a name of the safetensors format: F32, BF16, F16, I64. What is kept is the value / 2^`scale`.
    """

    kind: str
    logical: Logical
    start: int
    length: int
    dtype: str
    scale: int = 0

    @property
    def key(self) -> str:
        """Name of the tensor in its file, unique among the shards of one rank."""
        return f"{self.kind}|{self.logical.name}|{self.start}"

    @property
    def nbytes(self) -> int:
        return self.length * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Box:
    """A box of the logical tensor; its elements lie in the shard one after the other from `source` on."""

    offset: Ints
    size: Ints
    source: int


@dataclass(frozen=True)
class Piece:
    """A shard that is there to be read: in file `file`, from byte `at` on."""

    file: str
    at: int
    shard: Shard

    @cached_property
    def boxes(self) -> list[Box]:
        return boxes(self.shard)

    @cached_property
    def rows(self) -> tuple[int, int]:
        """First and one past the last row (index of axis 0) of the boxes."""
        return _rows(self.boxes)


@dataclass(frozen=True)
class Copy:
    """Fill a strided block of the needed shard from a strided block of a kept one.

    Offsets and strides are in elements of the two flat shards. The block is in its simplest form: one axis of stride 1
    on both sides is a plain run.
    """

    piece: Piece
    size: Ints
    source: int
    source_strides: Ints
    target: int
    target_strides: Ints

    @property
    def is_run(self) -> bool:
        return len(self.size) == 1 and self.source_strides == self.target_strides == (1,)


def equal_parts(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` when `length` elements are divided over `parts`, the larger parts first."""
    small, larger = divmod(length, parts)
    return index * small + min(index, larger), small + (index < larger)


def boxes(shard: Shard) -> list[Box]:
    """The shard's elements as boxes of the logical tensor, in flat order, without padding."""
    logical = shard.logical
    assert 0 <= shard.start <= shard.start + shard.length <= prod(logical.size), f"{shard} lies outside its local tensor"
    assert all(o + s <= n for o, s, n in list(zip(logical.offset, logical.size, logical.shape, strict=True))[1:]), f"{shard}: padded axis"
    found = []
    for offset, size, source in _split(logical.size, shard.start, shard.start + shard.length):
        offset = tuple(a + b for a, b in zip(logical.offset, offset, strict=True))
        if size and offset[0] + size[0] > logical.shape[0]:
            # A box is a run of the flat order, so cutting its last rows leaves a shorter run.
            size = (logical.shape[0] - offset[0], *size[1:])
        if not size or size[0] > 0:
            found.append(Box(offset, size, source))
    return found


def _split(size: Ints, start: int, end: int) -> list[tuple[Ints, Ints, int]]:
    """(offset, size, flat offset from `start`) of the boxes that make up [start, end) of a row-major tensor of shape `size`."""
    if end <= start:
        return []
    if not size:
        return [((), (), 0)]
    row = prod(size[1:])
    first, last = -(-start // row), end // row  # whole rows: first <= row < last
    if first > last:  # begins and ends within one row
        return _within(size, last, start, end, 0)
    found = _within(size, first - 1, start, first * row, 0) if start < first * row else []
    if first < last:
        found.append(((first,) + (0,) * (len(size) - 1), (last - first, *size[1:]), first * row - start))
    if last * row < end:
        found += _within(size, last, last * row, end, last * row - start)
    return found


def _within(size: Ints, row: int, start: int, end: int, source: int) -> list[tuple[Ints, Ints, int]]:
    """As _split, for a range that lies in one row; `source` is where the range begins in the shard."""
    skip = row * prod(size[1:])
    return [((row, *offset), (1, *inner), source + more) for offset, inner, more in _split(size[1:], start - skip, end - skip)]


def index(pieces: Iterable[Piece]) -> dict[tuple[str, str], list[Piece]]:
    """Pieces by (kind, logical name)."""
    found: dict[tuple[str, str], list[Piece]] = {}
    for piece in pieces:
        found.setdefault((piece.shard.kind, piece.shard.logical.name), []).append(piece)
    return found


def overlaps(needed: Shard, present: Sequence[Piece]) -> list[Copy]:
    """How to fill `needed` from the kept pieces of the same kind and name: every element that is not padding exactly once.

    Raises CheckpointError if the pieces are of a tensor of another shape, or leave elements uncovered.
    """
    if not present:
        raise CheckpointError(f"{needed.kind} of {needed.logical.name}", "nothing", "the tensor: the checkpoint is of another model")
    for piece in present:
        if piece.shard.logical.shape != needed.logical.shape:
            raise CheckpointError(f"{needed.kind} of {needed.logical.name}", f"shape {list(piece.shard.logical.shape)}",
                                  f"shape {list(needed.logical.shape)}: the checkpoint is of another model")  # fmt: skip
    wanted = boxes(needed)
    first, last = _rows(wanted)
    copies, missing = [], [(box.offset, box.size) for box in wanted]
    for piece in present:
        if not missing or piece.rows[0] >= last or piece.rows[1] <= first:
            continue  # with hundreds of ranks nearly all pieces are far from the one that is needed
        for box in piece.boxes:
            rest = []
            for offset, size in missing:
                low, high = _meet(offset, size, box)
                if all(a < b for a, b in zip(low, high, strict=True)):
                    copies.append(_copy(needed, piece, low, high))
                    rest += _minus(offset, size, low, high)
                else:
                    rest.append((offset, size))
            missing = rest
    if missing:
        count = sum(prod(size) for _, size in missing)
        raise CheckpointError(f"{needed.kind} of {needed.logical.name}", f"{count} of {needed.length} elements are in no file",
                              "a checkpoint that holds the whole tensor")  # fmt: skip
    return copies


def _rows(found: Sequence[Box]) -> tuple[int, int]:
    """First and one past the last row that boxes touch; a scalar counts as one row."""
    spans = [(box.offset[0], box.offset[0] + box.size[0]) if box.size else (0, 1) for box in found]
    return min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0)


def _meet(offset: Ints, size: Ints, box: Box) -> tuple[Ints, Ints]:
    """(first, one past the last) coordinates of the part that two boxes share; empty where first >= last on an axis."""
    low = tuple(map(max, offset, box.offset))
    high = tuple(min(o + s, p + t) for o, s, p, t in zip(offset, size, box.offset, box.size, strict=True))
    return low, high


def _minus(offset: Ints, size: Ints, low: Ints, high: Ints) -> list[tuple[Ints, Ints]]:
    """The box (offset, size) without the part [low, high) inside it, as boxes."""
    rest = []
    for axis in range(len(size)):
        begin, end = offset[axis], offset[axis] + size[axis]
        for a, b in ((begin, low[axis]), (high[axis], end)):
            if a < b:
                rest.append(((*offset[:axis], a, *offset[axis + 1 :]), (*size[:axis], b - a, *size[axis + 1 :])))
        offset = (*offset[:axis], low[axis], *offset[axis + 1 :])
        size = (*size[:axis], high[axis] - low[axis], *size[axis + 1 :])
    return rest


def _copy(needed: Shard, piece: Piece, low: Ints, high: Ints) -> Copy:
    source, source_strides = _place(piece.shard, low)
    target, target_strides = _place(needed, low)
    size: list[int] = []
    steps: list[tuple[int, int]] = []
    for axis, (a, b) in enumerate(zip(low, high, strict=True)):
        here = (source_strides[axis], target_strides[axis])
        if b - a == 1:
            continue
        if size and steps[-1] == (here[0] * (b - a), here[1] * (b - a)):  # the outer axis goes on where this one ends
            size[-1], steps[-1] = size[-1] * (b - a), here
        else:
            size.append(b - a)
            steps.append(here)
    if not size:
        size, steps = [1], [(1, 1)]
    return Copy(piece, tuple(size), source, tuple(s for s, _ in steps), target, tuple(t for _, t in steps))


def _place(shard: Shard, point: Ints) -> tuple[int, Ints]:
    """(flat offset of a logical coordinate within the shard, strides of the local tensor)."""
    logical = shard.logical
    strides = tuple(prod(logical.size[axis + 1 :]) for axis in range(len(logical.size)))
    flat = sum((p - o) * s for p, o, s in zip(point, logical.offset, strides, strict=True))
    return flat - shard.start, strides


def to_row(shard: Shard) -> list[Any]:
    """The shard as plain JSON data, with its scale where it has one; the shape of the logical tensor is kept once, elsewhere."""
    logical, scale = shard.logical, [shard.scale] if shard.scale else []
    return [shard.kind, logical.name, list(logical.offset), list(logical.size), shard.start, shard.length, shard.dtype, *scale]


def from_row(row: Sequence[Any], shapes: Mapping[str, Sequence[int]]) -> Shard:
    """The inverse of to_row, given the logical shapes by name."""
    kind, name, offset, size, start, length, dtype, *scale = row
    return Shard(kind, Logical(name, tuple(shapes[name]), tuple(offset), tuple(size)), start, length, dtype, *scale)

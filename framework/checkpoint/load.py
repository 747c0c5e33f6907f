"""Filling live tensors from a checkpoint of any layout. Each rank reads only what it needs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from framework.checkpoint.buffers import as_bytes
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.shards import ITEM_BYTES, Copy, Shard, index, overlaps
from framework.checkpoint.state import DTYPES
from framework.checkpoint.store import Checkpoint


def load(checkpoint: Checkpoint, wanted: Iterable[tuple[Shard, Tensor]]) -> int:
    """Fill each flat tensor with its shard's elements, in place, converting the dtype where it differs. Padding is left alone.

    Returns the bytes that were read. Raises CheckpointError, before anything is changed, where the checkpoint lacks elements
    or holds a tensor of another shape; and where a file ends early.
    """
    present = index(piece for file in checkpoint.manifest.files for piece in file.pieces())
    by_file: dict[str, list[tuple[int, Copy, Tensor]]] = {}
    for shard, tensor in wanted:
        assert tensor.numel() == shard.length, f"{shard.key}: a tensor of {tensor.numel()} elements"
        for copy in overlaps(shard, present.get((shard.kind, shard.logical.name), [])):
            by_file.setdefault(copy.piece.file, []).append((_first_byte(copy), copy, tensor.detach()))
    count = 0
    for name, copies in by_file.items():
        copies.sort(key=lambda entry: entry[0])  # in the order of the file: disks like to read ahead
        with _open(checkpoint, name) as reader:
            for at, copy, tensor in copies:
                count += _fill(reader, at, copy, tensor)
    return count


def _first_byte(copy: Copy) -> int:
    return copy.piece.at + copy.source * ITEM_BYTES[copy.piece.shard.dtype]


def _fill(reader: Reader, at: int, copy: Copy, tensor: Tensor) -> int:
    """Copy one block, which begins at byte `at` of the file. Returns the bytes of the block."""
    dtype, item = DTYPES[copy.piece.shard.dtype], ITEM_BYTES[copy.piece.shard.dtype]
    if copy.is_run and tensor.dtype == dtype and tensor.device.type == "cpu":
        target = as_bytes(tensor[copy.target : copy.target + copy.size[0]])
        reader.read_into(at, target)
        return len(target)
    span = 1 + sum((n - 1) * stride for n, stride in zip(copy.size, copy.source_strides, strict=True))
    source = torch.frombuffer(reader.span(at, span * item), dtype=dtype).as_strided(copy.size, copy.source_strides)
    target = tensor.as_strided(copy.size, copy.target_strides, tensor.storage_offset() + copy.target)
    target.copy_(source)
    return source.numel() * item


class Reader(Protocol):
    """One file of a checkpoint, open for reading."""

    def read_into(self, at: int, target: memoryview) -> None: ...

    def span(self, at: int, count: int) -> memoryview:
        """`count` bytes from byte `at` on, in memory that may be written to without changing the file."""
        ...

    def __enter__(self) -> Reader: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def _open(checkpoint: Checkpoint, name: str) -> Reader:
    path = f"{checkpoint.path}/{name}"
    return LocalReader(path) if checkpoint.is_local else RemoteReader(checkpoint.files, path)


class LocalReader:
    """Runs are read straight into the tensors, strided blocks through a mapping that touches only the pages they lie in."""

    def __init__(self, path: str) -> None:
        self.path, self.handle = path, os.open(path, os.O_RDONLY)
        self.map: mmap.mmap | None = None

    def read_into(self, at: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self.handle, [target], at)
            if count == 0:
                raise CheckpointError(self.path, f"end of the file at byte {at}", "more", "take an older checkpoint")
            target, at = target[count:], at + count

    def span(self, at: int, count: int) -> memoryview:
        self.map = self.map or mmap.mmap(self.handle, 0, access=mmap.ACCESS_COPY)
        return memoryview(self.map)[at : at + count]

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.handle)


class RemoteReader:
    """Every block is fetched with everything between its first and its last byte."""

    def __init__(self, files: Any, path: str) -> None:
        self.path, self.file = path, files.open(path, "rb")

    def read_into(self, at: int, target: memoryview) -> None:
        self.file.seek(at)
        while target:
            count = self.file.readinto(target)
            if not count:
                raise CheckpointError(self.path, f"end of the file at byte {at}", "more", "take an older checkpoint")
            target, at = target[count:], at + count

    def span(self, at: int, count: int) -> memoryview:
        target = memoryview(bytearray(count))
        self.read_into(at, target)
        return target

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.file.close()

"""Filling live tensors from a checkpoint of any layout. Each rank reads only what it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from framework.checkpoint.buffers import as_bytes
from framework.checkpoint.manifest import File
from framework.checkpoint.read import Checked, Reader, open_reader
from framework.checkpoint.scaling import unpack
from framework.checkpoint.shards import ITEM_BYTES, Copy, Shard, overlaps
from framework.checkpoint.state import DTYPES
from framework.checkpoint.store import Checkpoint


def load(checkpoint: Checkpoint, wanted: Iterable[tuple[Shard, Tensor]], checked: Collection[File] = ()) -> int:
    """Fill each flat tensor with its shard's elements, in place, converting the dtype where it differs. Padding is left alone.

    The checksums of the files `checked` are compared on the way, also where nothing else is needed of them. Returns the
    bytes that went into tensors. Raises CheckpointError, before anything is changed, where the checkpoint lacks elements or
    holds a tensor of another shape; later, where a file ends early or has another checksum.
    """
    by_file: dict[str, list[tuple[int, Copy, Tensor]]] = {file.name: [] for file in checked}
    for shard, tensor in wanted:
        assert tensor.numel() == shard.length, f"{shard.key}: a tensor of {tensor.numel()} elements"
        for copy in overlaps(shard, checkpoint.pieces.get((shard.kind, shard.logical.name), [])):
            by_file.setdefault(copy.piece.file, []).append((_first_byte(copy), copy, tensor.detach()))
    kept = {file.name: file for file in checked}
    count = 0
    for name, copies in by_file.items():
        copies.sort(key=lambda entry: entry[0])  # in the order of the file: disks like to read ahead, and checksums need it
        plain = open_reader(checkpoint.files, f"{checkpoint.path}/{name}", checkpoint.is_local)
        with Checked(plain, kept[name]) if name in kept else plain as reader:
            count += sum(_fill(reader, at, copy, tensor) for at, copy, tensor in copies)
            if isinstance(reader, Checked):
                reader.finish()
    return count


def _first_byte(copy: Copy) -> int:
    return copy.piece.at + copy.source * ITEM_BYTES[copy.piece.shard.dtype]


def _fill(reader: Reader, at: int, copy: Copy, tensor: Tensor) -> int:
    """Copy one block, which begins at byte `at` of the file. Returns the bytes of the block."""
    dtype, item = DTYPES[copy.piece.shard.dtype], ITEM_BYTES[copy.piece.shard.dtype]
    if copy.is_run and tensor.dtype == dtype and tensor.device.type == "cpu" and not copy.piece.shard.scale:
        target = as_bytes(tensor[copy.target : copy.target + copy.size[0]])
        reader.read_into(at, target)
        return len(target)
    span = 1 + sum((n - 1) * stride for n, stride in zip(copy.size, copy.source_strides, strict=True))
    source = torch.frombuffer(reader.span(at, span * item), dtype=dtype).as_strided(copy.size, copy.source_strides)
    target = tensor.as_strided(copy.size, copy.target_strides, tensor.storage_offset() + copy.target)
    target.copy_(unpack(copy.piece.shard, source))
    return source.numel() * item

"""The model alone out of a checkpoint of any layout: whole tensors by name in safetensors files, as other tools read them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.buffers import as_bytes
from framework.checkpoint.errors import CheckpointError, SaveError, said
from framework.checkpoint.folders import flush_names
from framework.checkpoint.load import load
from framework.checkpoint.manifest import FROZEN, encode_header, header_text
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import DTYPES
from framework.checkpoint.store import Checkpoint

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""A larger model comes in several files, as the Hugging Face hub wants it."""


def export_weights(checkpoint: Checkpoint, folder: Path, dtype: str, file_bytes: int = FILE_BYTES) -> int:
    """Write the weights into the new `folder`, whole or not at all, and return their bytes. Needs the memory of one tensor.

    `dtype` is F32, BF16 or F16; what is trained comes from its master. One file model.safetensors; with more than
    `file_bytes` bytes model-00001-of-0000N.safetensors and so on, and an index that says which tensor is where. A tied
    tensor is there once, under its first name. Raises CheckpointError for a weight that F16 cannot hold and where the
    checkpoint lacks elements, SaveError where the disk refuses.
    """
    kinds = {name: kind for kind, name in checkpoint.pieces if kind in ("master", FROZEN)}
    shapes = checkpoint.shapes()
    weights = [_whole(kinds[name], name, shapes[kinds[name], name], dtype) for name in kinds]
    files = _divide(weights, file_bytes)
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, members in zip(names, files, strict=True):
            _write(temporary / name, checkpoint, members)
        total = sum(shard.nbytes for shard in weights)
        if len(files) > 1:
            places = {shard.logical.name: name for name, members in zip(names, files, strict=True) for shard in members}
            (temporary / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
        flush_names(temporary)
        os.rename(temporary, folder)
        flush_names(folder.parent)
    except OSError as error:
        raise SaveError(str(folder), said(error), "a place for a new folder, with room for the weights") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def _whole(kind: str, name: str, shape: tuple[int, ...], dtype: str) -> Shard:
    return Shard(kind, Logical.whole(name, shape), 0, prod(shape), dtype)


def _divide(weights: Sequence[Shard], file_bytes: int) -> list[list[Shard]]:
    """In order, as many to a file as fit; a single tensor may be larger."""
    files: list[list[Shard]] = [[]]
    for shard in weights:
        if files[-1] and sum(member.nbytes for member in files[-1]) + shard.nbytes > file_bytes:
            files.append([])
        files[-1].append(shard)
    return files


def _write(path: Path, checkpoint: Checkpoint, members: Sequence[Shard]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    end = 0
    for shard in members:
        entries[shard.logical.name] = {"dtype": shard.dtype, "shape": shard.logical.shape, "data_offsets": [end, end + shard.nbytes]}
        end += shard.nbytes
    with open(path, "wb") as file:
        file.write(encode_header(header_text(entries)))
        for shard in members:
            tensor = torch.empty(shard.length, dtype=DTYPES[shard.dtype])
            load(checkpoint, [(shard, tensor)])
            if shard.dtype == "F16" and bool(tensor.isinf().any()):
                raise CheckpointError(shard.logical.name, "a weight above 65504", "one that F16 can hold", "BF16 or F32")
            file.write(as_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())

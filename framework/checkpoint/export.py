"""The model alone out of a checkpoint of any layout: whole tensors by name in safetensors files, as other tools read them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.buffers import as_bytes
from framework.checkpoint.errors import CheckpointError, SaveError, said
from framework.checkpoint.folders import flush_names
from framework.checkpoint.load import load
from framework.checkpoint.manifest import FROZEN, encode_header, header_text
from framework.checkpoint.shards import ITEM_BYTES, Logical, Shard
from framework.checkpoint.state import DTYPES
from framework.checkpoint.store import Checkpoint

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""A larger model comes in several files, as the Hugging Face hub wants it."""


@dataclass(frozen=True)
class Entry:
    """A tensor of the files: the kept tensors `parts`, joined along axis 0, and transposed where `turned`."""

    name: str
    parts: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True)
class _Sized:
    """An entry with the shards that it takes from the checkpoint, and the shape that it has in the file."""

    entry: Entry
    shards: tuple[Shard, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def export_weights(
    checkpoint: Checkpoint, folder: Path, dtype: str, entries: Sequence[Entry] | None = None,
    beside: Mapping[str, bytes] | None = None, file_bytes: int = FILE_BYTES,
) -> int:  # fmt: skip
    """Write the weights into the new `folder`, whole or not at all, and return their bytes. Needs the memory of one tensor.

    `dtype` is F32, BF16 or F16; what is trained comes from its master. `entries` says which tensors there are; None: those that
    are kept, by their own names, a tied one once under its first name. One file model.safetensors; with more than
    `file_bytes` bytes model-00001-of-0000N.safetensors and so on, and an index that says which tensor is where. The files
    `beside`, name to content, are written too. Raises CheckpointError for a weight that F16 cannot hold and where the
    checkpoint lacks elements, SaveError where the disk refuses.
    """
    weights = _sized(checkpoint, dtype, entries)
    files = _divide(weights, file_bytes)
    names = ["model.safetensors"] if len(files) == 1 else [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, members in zip(names, files, strict=True):
            _write(temporary / name, checkpoint, members)
        total = sum(member.nbytes for member in weights)
        if len(files) > 1:
            places = {member.entry.name: name for name, members in zip(names, files, strict=True) for member in members}
            (temporary / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
        for name, content in (beside or {}).items():
            (temporary / name).write_bytes(content)
        flush_names(temporary)
        os.rename(temporary, folder)
        flush_names(folder.parent)
    except OSError as error:
        raise SaveError(str(folder), said(error), "a place for a new folder, with room for the weights") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def _sized(checkpoint: Checkpoint, dtype: str, entries: Sequence[Entry] | None) -> list[_Sized]:
    """Raises CheckpointError for a part that the checkpoint has not, and for one that no entry takes."""
    kinds = {name: kind for kind, name in checkpoint.pieces if kind in ("master", FROZEN)}
    shapes = checkpoint.shapes()
    entries = [Entry(name, (name,)) for name in kinds] if entries is None else entries
    different = set(kinds) ^ {part for entry in entries for part in entry.parts}
    if different:
        raise CheckpointError(min(different), "it is in the checkpoint or in the model, not in both", "a checkpoint of this model")
    found = []
    for entry in entries:
        each = [shapes[kinds[part], part] for part in entry.parts]
        wholes = [Logical.whole(part, shape) for part, shape in zip(entry.parts, each, strict=True)]
        shards = [Shard(kinds[whole.name], whole, 0, prod(whole.shape), dtype) for whole in wholes]
        joined = (sum(shape[0] for shape in each), *each[0][1:])
        found.append(_Sized(entry, tuple(shards), joined[::-1] if entry.turned else joined))
    return found


def _divide(weights: Sequence[_Sized], file_bytes: int) -> list[list[_Sized]]:
    """In order, as many to a file as fit; a single tensor may be larger."""
    files: list[list[_Sized]] = [[]]
    for member in weights:
        if files[-1] and sum(other.nbytes for other in files[-1]) + member.nbytes > file_bytes:
            files.append([])
        files[-1].append(member)
    return files


def _write(path: Path, checkpoint: Checkpoint, members: Sequence[_Sized]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    end = 0
    for member in members:
        entries[member.entry.name] = {"dtype": member.shards[0].dtype, "shape": member.shape, "data_offsets": [end, end + member.nbytes]}
        end += member.nbytes
    with open(path, "wb") as file:
        file.write(encode_header(header_text(entries)))
        for member in members:
            file.write(as_bytes(_read(checkpoint, member)))
        file.flush()
        os.fsync(file.fileno())


def _read(checkpoint: Checkpoint, member: _Sized) -> Tensor:
    """The flat elements of a tensor of the file."""
    dtype = member.shards[0].dtype
    flat = torch.empty(member.nbytes // ITEM_BYTES[dtype], dtype=DTYPES[dtype])
    load(checkpoint, zip(member.shards, flat.split([shard.length for shard in member.shards]), strict=True))
    if dtype == "F16" and bool(flat.isinf().any()):
        raise CheckpointError(member.entry.name, "a weight above 65504", "one that F16 can hold", "BF16 or F32")
    return flat.view(member.shape[::-1]).t().contiguous().flatten() if member.entry.turned else flat

"""The format on disk: names of folders and files, the layout of a safetensors file, and the manifest. No torch, no I/O.

A checkpoint is a folder step_00000010/ with
- manifest.json: written last; a folder without it is not a checkpoint
- rank_00000.safetensors: the trained part of a rank, each shard one flat tensor
- weights_00000.safetensors: parameters that are not trained; later folders hold the same file as a hard link
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.shards import ITEM_BYTES, Piece, Shard, from_row, to_row

FORMAT = 1
MANIFEST = "manifest.json"
ALIGNMENT = 64
"""The format wants 8; but where file and memory are not aligned to each other's cache lines, reading takes half as long again."""
FROZEN = "weight"
"""The kind of parameters that are not trained: they lie in a file of their own, written once."""


def step_name(step: int) -> str:
    """10 -> 'step_00000010'."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """'step_00000010' -> 10; None for any other name."""
    found = re.fullmatch(r"step_(\d{8,})", name)
    return int(found[1]) if found else None


def weights_name(rank: int) -> str:
    """The file of parameters that are not trained."""
    return f"weights_{rank:05d}.safetensors"


@dataclass(frozen=True)
class FilePlan:
    """One file to be written: `header`, then the `nbytes` bytes that lie from `start` on in the host memory.

    `members` are indices into the state's shards, in the order of the file; `shards` are those shards as rows.
    """

    name: str
    header: str
    start: int
    nbytes: int
    members: list[int]
    shards: list[list[Any]]
    shapes: dict[str, list[int]]


def arrange(shards: Sequence[Shard], rank: int) -> tuple[FilePlan, ...]:
    """Lay shards out in this rank's files: the trained part, then what is not trained, if any.

    Larger items come first within a file, so that every tensor is aligned to its own item size.
    """
    plans, start = [], 0
    for name, frozen in ((f"rank_{rank:05d}.safetensors", False), (weights_name(rank), True)):
        members = [at for at, shard in enumerate(shards) if (shard.kind == FROZEN) == frozen and shard.length > 0]
        if members or not frozen:
            members.sort(key=lambda at: -ITEM_BYTES[shards[at].dtype])
            plans.append(_plan(name, start, members, [shards[at] for at in members]))
            start = -(-(start + plans[-1].nbytes) // ALIGNMENT) * ALIGNMENT
    return tuple(plans)


def _plan(name: str, start: int, members: list[int], shards: list[Shard]) -> FilePlan:
    entries: dict[str, Any] = {}
    end = 0
    for shard in shards:
        assert shard.key not in entries, f"two shards are called {shard.key}"
        entries[shard.key] = {"dtype": shard.dtype, "shape": [shard.length], "data_offsets": [end, end + shard.nbytes]}
        end += shard.nbytes
    shapes = {shard.logical.name: list(shard.logical.shape) for shard in shards}
    return FilePlan(name, header_text(entries), start, end, members, [to_row(shard) for shard in shards], shapes)


def header_text(entries: dict[str, Any]) -> str:
    """The JSON of a safetensors file, as long as to let the data begin at a multiple of ALIGNMENT bytes."""
    text = json.dumps(entries, separators=(",", ":"))
    return text + " " * (-(8 + len(text.encode())) % ALIGNMENT)


def encode_header(text: str) -> bytes:
    """Length (8 bytes, little-endian) and JSON: the begin of a safetensors file."""
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


@dataclass(frozen=True)
class File:
    """A file of a complete checkpoint, `size` bytes long. The tensors of `shards` lie one after the other from byte `data_start` on."""

    name: str
    size: int
    xxh3_128: str
    data_start: int
    shards: list[list[Any]]
    shapes: dict[str, list[int]]

    def pieces(self) -> list[Piece]:
        """What the file holds."""
        found, at = [], self.data_start
        for row in self.shards:
            shard = from_row(row, self.shapes)
            found.append(Piece(self.name, at, shard))
            at += shard.nbytes
        return found


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of. `local` holds the local state of each rank that wrote it."""

    step: int
    attempt: str
    files: list[File]
    small: dict[str, Any] = field(default_factory=dict)
    local: list[dict[str, Any]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def file(self, name: str) -> File:
        return next(file for file in self.files if file.name == name)

    def share(self, index: int, parts: int) -> list[File]:
        """The files whose checksums reader `index` of `parts` compares; on as many ranks as wrote, those that it needs anyway."""
        return sorted(self.files, key=lambda file: file.name)[index::parts]

    def encode(self) -> bytes:
        body = {**vars(self), "files": [vars(file) for file in self.files]}
        return json.dumps({"format": FORMAT, "xxh3_128": _digest(body), **body}).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes, where: str) -> Manifest:
        """Raises CheckpointError where the content is damaged or of a newer format; `where` is the path for the letter."""
        try:
            body = json.loads(content)
            version, digest = body.pop("format"), body.pop("xxh3_128")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(where, f"unreadable: {error}", "a JSON manifest", "take an older checkpoint") from error
        if version != FORMAT:
            raise CheckpointError(where, f"format {version}", f"format {FORMAT}", "read it with the version of framework that wrote it")
        if digest != _digest(body):
            raise CheckpointError(where, "content that does not match its own checksum", f"xxh3_128 {digest}", "take an older checkpoint")
        return cls(**{**body, "files": [File(**file) for file in body["files"]]})


def join(parts: Sequence[dict[str, Any]], step: int, small: dict[str, Any]) -> Manifest:
    """The manifest of a checkpoint from the parts (attempt, files, local) of all its ranks, in rank order."""
    files = [File(**file) for entry in parts for file in entry["files"]]
    return Manifest(step, parts[0]["attempt"], files, small, [entry["local"] for entry in parts])


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body).encode())

"""What a preparation has done so far, kept so that a kill costs one part: token ids, lengths, and a line for each finished part.

    OUT.partial/  job.json       what is being prepared, from what
                  tokens.bin     ids of the documents so far; becomes OUT.bin by a rename
                  lengths.bin    of each document, int32
                  digests.bin    of each text, 16 bytes, where doubles are looked for
                  journal.jsonl  one line per part, written when the part lies on the disk: where it ends, its checksum, counts

Whoever starts again reads the lines, proves each part by its checksum, and cuts off what stands behind the last one.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from framework.base.files import fsync_folder, write_atomic

FILES = ("tokens.bin", "lengths.bin", "digests.bin")
CHUNK_BYTES = 1 << 24

Tally = Counter[str]
"""Counts of one source: read, documents, tokens, bytes (of kept text), empty, bad_utf8, over_long, duplicates."""


@dataclass(frozen=True)
class Part:
    """A finished part: the reader stood behind `taken` documents of source number `source`; `ends` are the sizes of FILES in bytes
    behind it; `checksum` is the xxh3_128 of its bytes in each; `counts` is what it added, by source number."""

    source: int
    taken: int
    ends: tuple[int, ...]
    checksum: str
    counts: dict[str, dict[str, int]]


@dataclass
class Journal:
    """The files of one preparation, open to append. `tallies` by source number; `digest` is of all token ids so far."""

    folder: Path
    parts: int = 0
    source: int = 0
    taken: int = 0
    tallies: dict[int, Tally] = field(default_factory=dict)
    digest: Any = field(default_factory=xxhash.xxh3_128)
    _ends: list[int] = field(default_factory=lambda: [0, 0, 0])
    _files: list[BinaryIO] = field(default_factory=list)
    _part: list[Any] = field(default_factory=list)
    _counts: dict[int, Tally] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """Take up what is proved, cut off the rest."""
        journal = cls(folder)
        lines = folder / "journal.jsonl"
        kept = []
        handles: list[BinaryIO] = [open(folder / name, "a+b") for name in FILES]  # noqa: SIM115  (open as long as the journal)
        for line in lines.read_text().splitlines() if lines.exists() else ():
            part = _read(line)
            if part is None or not journal._prove(part, handles):
                break
            kept.append(line)
            journal._take_up(part)
        for handle, end in zip(handles, journal._ends, strict=True):
            handle.truncate(end)
            handle.seek(end)
        write_atomic(lines, "".join(f"{line}\n" for line in kept).encode())
        journal._files = handles
        journal._begin_part()
        return journal

    def _prove(self, part: Part, handles: list[BinaryIO]) -> bool:
        """Whether the part's bytes are there and have its checksum; its ids then count for the digest of all."""
        sums = [xxhash.xxh3_128() for _ in FILES]
        whole = self.digest.copy()
        for index, (handle, start, end) in enumerate(zip(handles, self._ends, part.ends, strict=True)):
            handle.seek(start)
            left = end - start
            while left > 0 and (chunk := handle.read(min(left, CHUNK_BYTES))):
                sums[index].update(chunk)
                if index == 0:
                    whole.update(chunk)
                left -= len(chunk)
            if left:
                return False
        if _together(sums) != part.checksum:
            return False
        self.digest = whole
        return True

    def _take_up(self, part: Part) -> None:
        self.parts += 1
        self.source, self.taken, self._ends = part.source, part.taken, list(part.ends)
        for number, counts in part.counts.items():
            self.tallies.setdefault(int(number), Counter()).update(counts)

    def _begin_part(self) -> None:
        self._part, self._counts = [xxhash.xxh3_128() for _ in FILES], {}

    def add(self, tokens: np.ndarray, lengths: list[int], digests: list[bytes]) -> None:
        """Append documents: their ids, the length of each, and the digests of their texts."""
        contents = (np.ascontiguousarray(tokens).tobytes(), np.array(lengths, "<i4").tobytes(), b"".join(digests))
        for index, content in enumerate(contents):
            self._files[index].write(content)
            self._part[index].update(content)
            self._ends[index] += len(content)
        self.digest.update(contents[0])

    def count(self, source: int, counts: Tally) -> None:
        """Add to the counts of a source."""
        for tallies in (self.tallies, self._counts):
            tallies.setdefault(source, Counter()).update(counts)

    def commit(self, source: int, taken: int) -> None:
        """Make a part of what was added: on the disk when this returns."""
        for handle in self._files:
            handle.flush()
            os.fsync(handle.fileno())
        counts = {str(number): dict(tally) for number, tally in self._counts.items()}
        part = Part(source, taken, tuple(self._ends), _together(self._part), counts)
        with open(self.folder / "journal.jsonl", "a") as lines:
            lines.write(json.dumps(asdict(part)) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        self.parts, self.source, self.taken = self.parts + 1, source, taken
        self._begin_part()

    def seen(self) -> set[bytes]:
        """Digests of all texts so far: about 100 bytes of memory each."""
        content = (self.folder / "digests.bin").read_bytes()
        return {content[at : at + 16] for at in range(0, len(content), 16)}

    def lengths(self) -> np.ndarray:
        """Of all documents, in tokens: int32 [documents]."""
        return np.fromfile(self.folder / "lengths.bin", "<i4")

    def close(self) -> None:
        for handle in self._files:
            handle.close()
        fsync_folder(self.folder)


def _read(line: str) -> Part | None:
    """None for a line that was torn by a kill."""
    try:
        values = json.loads(line)
        return Part(**{**values, "ends": tuple(values["ends"])})
    except (ValueError, TypeError, KeyError):
        return None


def _together(sums: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(each.digest() for each in sums))

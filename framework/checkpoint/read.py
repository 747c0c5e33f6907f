"""One file of a checkpoint, open for reading: local, behind a URL, and checked on the way. No torch."""

from __future__ import annotations

import mmap
import os
from types import TracebackType
from typing import Any, Protocol

import xxhash

from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.manifest import File

CHUNK = 1 << 20
"""Bytes read and hashed at a time; they stay in the processor's cache between the two."""


class Reader(Protocol):
    """What the code that fills tensors reads from."""

    path: str

    def read_into(self, at: int, target: memoryview) -> None:
        """Fill `target` with the bytes from byte `at` on. Raises CheckpointError where the file ends before."""
        ...

    def span(self, at: int, count: int) -> memoryview:
        """`count` bytes from byte `at` on, in memory that may be written to without changing the file."""
        ...

    def __enter__(self) -> Reader: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_reader(files: Any, path: str, is_local: bool) -> Reader:
    """`files` is the fsspec file system that `path` is in."""
    return LocalReader(path) if is_local else RemoteReader(files, path)


class LocalReader:
    """Runs are read straight into their place, other blocks through a mapping that touches only the pages they lie in."""

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


class Checked:
    """Reads as `reader` does, and takes every byte of the file into a checksum, in order and mostly in the same pass.

    What is read in the order of the file is hashed where it has just been put; the gaps are read for the checksum alone.
    """

    def __init__(self, reader: Reader, file: File) -> None:
        self.reader, self.file, self.path = reader, file, reader.path
        self.digest = xxhash.xxh3_128()
        self.hashed = 0  # bytes from the begin of the file
        self.scratch = memoryview(bytearray(CHUNK))

    def read_into(self, at: int, target: memoryview) -> None:
        self._hash_up_to(at)
        for start in range(0, len(target), CHUNK):
            chunk = target[start : start + CHUNK]
            self.reader.read_into(at + start, chunk)
            if at + start == self.hashed:
                self._take(chunk)

    def span(self, at: int, count: int) -> memoryview:
        return self.reader.span(at, count)

    def finish(self) -> None:
        """Read what is left. Raises CheckpointError where the file is not the one that was written."""
        self._hash_up_to(self.file.size)
        found = self.digest.hexdigest()
        if found != self.file.xxh3_128:
            raise CheckpointError(self.path, f"xxh3_128 {found}", f"xxh3_128 {self.file.xxh3_128}", "take an older checkpoint")

    def __enter__(self) -> Checked:
        self.reader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.reader.__exit__(kind, error, trace)

    def _hash_up_to(self, end: int) -> None:
        while self.hashed < end:
            chunk = self.scratch[: min(CHUNK, end - self.hashed)]
            self.reader.read_into(self.hashed, chunk)
            self._take(chunk)

    def _take(self, chunk: memoryview) -> None:
        self.digest.update(chunk)
        self.hashed += len(chunk)

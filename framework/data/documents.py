"""Documents out of the files that people have: plain text, JSON lines and parquet, plain or compressed, here or behind a URL.

    .txt       one document per file, or what stands between separators
    .jsonl     one document per line, a field of its object
    .parquet   one document per row, a column (needs pyarrow)

each also as .gz, .bz2, .xz and .zst (needs zstandard). Reading and making text are apart: `records` gives raw bytes in the
order of the files, quickly and in one process; `text_of` makes a text of each, in any process. Nothing here writes.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import importlib
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO, Any

from framework.base.errors import DataError
from framework.data.remote import Remote, bare, find_remote

FORMS = (".txt", ".jsonl", ".parquet")
PACKED = (".gz", ".bz2", ".xz", ".zst")
CHUNK_BYTES = 1 << 20
ROWS = 1024
"""Rows of a parquet file that are read at once."""


@dataclass(frozen=True)
class Source:
    """A file of documents. `path` is as it was found, a URL with its protocol; `size` in bytes on disk, 0 where a server does not say
    it; `changed` says when or which."""

    path: str
    form: str
    packing: str
    size: int
    changed: str


@dataclass(frozen=True)
class Record:
    """One document, not read yet: of source number `source`, its bytes from `place` on (of parquet: row `place`)."""

    source: int
    place: int
    raw: bytes


@dataclass(frozen=True)
class Text:
    """A document. `spoilt` is the place of the first byte that is not UTF-8, None for sound text; `text` then has U+FFFD there."""

    text: str
    spoilt: str | None = None


def find_sources(patterns: Sequence[str]) -> list[Source]:
    """The files that paths, globs and URLs stand for: in the order of the patterns, sorted within each.

    Raises DataError for a pattern without a file, a file that two patterns name, and a name of no known form.
    """
    found: dict[str, Source] = {}
    for pattern in patterns:
        paths = find_remote(pattern) if "://" in pattern else _local(pattern)
        for path, size, changed in paths:
            if path in found:
                raise DataError("data.files", f"{path}, named twice (again by {pattern})", "each file once")
            name = bare(path).lower()
            packing = next((end for end in PACKED if name.endswith(end)), "")
            form = os.path.splitext(name.removesuffix(packing))[1]
            if form not in FORMS:
                got = f"a name that ends with {form or 'nothing'}"
                raise DataError(path, got, f"{', '.join(FORMS)}, and behind it {', '.join(PACKED)} or nothing")
            found[path] = Source(path, form, packing, size, changed)
    return list(found.values())


def _local(pattern: str) -> list[tuple[str, int, str]]:
    paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    files = [path for path in paths if os.path.isfile(path)]
    if not files:
        got = "a folder" if os.path.isdir(pattern) else "no such file"
        raise DataError(pattern, got, "a file, or a glob that fits one", f"data.files=['{pattern}/*.jsonl']" if got == "a folder" else "")
    stats = [os.stat(path) for path in files]
    return [(path, stat.st_size, str(stat.st_mtime_ns)) for path, stat in zip(files, stats, strict=True)]


class Reading:
    """An open source. `done`: bytes of the file on disk that have been read."""

    def __init__(self, source: Source, file: IO[bytes]) -> None:
        self.source, self._file = source, file

    @property
    def done(self) -> int:
        return min(self.source.size, self._file.tell())

    def pieces(self, separator: bytes | None, column: str) -> Iterator[tuple[int, bytes]]:
        """(place, raw bytes) of each document. Raises DataError where the file is damaged."""
        try:
            unpacked = _unpacked(self._file, self.source)
            if self.source.form == ".parquet":
                yield from _rows(unpacked, self.source, column)
            elif self.source.form == ".jsonl":
                yield from _separated(unpacked, b"\n")
            else:
                yield from _separated(unpacked, separator) if separator else [(0, unpacked.read())]
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            got = f"a file that does not read to its end: {error}"
            raise DataError(self.source.path, got, f"a whole {self.source.packing or self.source.form} file") from None


@contextmanager
def opened(source: Source) -> Iterator[Reading]:
    """A source to read from. Raises DataError if it cannot be opened."""
    try:
        remote = "://" in source.path
        file: Any = Remote(source.path, source.size, source.changed) if remote else open(source.path, "rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise DataError(source.path, error.strerror or str(error), "a file that can be read") from None
    with file:
        yield Reading(source, file)


def _unpacked(file: IO[bytes], source: Source) -> IO[bytes]:
    if source.packing == ".zst":
        library = _library("zstandard", source, "zstd")
        return library.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers[source.packing](file, "rb") if source.packing else file


def _separated(file: IO[bytes], separator: bytes) -> Iterator[tuple[int, bytes]]:
    """What stands between separators; nothing behind the last one is no document."""
    buffer, start, place = bytearray(), 0, 0
    while chunk := file.read(CHUNK_BYTES):
        buffer += chunk
        while (at := buffer.find(separator, start)) >= 0:
            yield place, bytes(buffer[:at])
            del buffer[: at + len(separator)]
            place, start = place + at + len(separator), 0
        start = max(0, len(buffer) - len(separator) + 1)  # what has been searched is not searched again
    if buffer:
        yield place, bytes(buffer)


def _rows(file: IO[bytes], source: Source, column: str) -> Iterator[tuple[int, bytes]]:
    library = _library("pyarrow", source, "parquet")
    parquet = _library("pyarrow.parquet", source, "parquet")
    try:
        table = parquet.ParquetFile(BytesIO(file.read()) if source.packing else file)
        if column not in table.schema_arrow.names:
            raise DataError(source.path, f"no column {column}", f"one of {', '.join(table.schema_arrow.names)}", "prepare.field=COLUMN")
        kind = table.schema_arrow.field(column).type
        if not any(check(kind) for check in (library.types.is_string, library.types.is_large_string, library.types.is_binary)):
            raise DataError(source.path, f"column {column} of type {kind}", "a column of texts", "prepare.field=COLUMN")
        place = 0
        for rows in table.iter_batches(ROWS, columns=[column]):
            # As bytes: a text that is not UTF-8 must come through as it is.
            for raw in rows.column(0).cast(library.large_binary()).to_pylist():
                yield place, raw or b""
                place += 1
    except library.ArrowInvalid as error:
        raise DataError(source.path, str(error)[:160], "a parquet file") from None


def _library(name: str, source: Source, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        got = f"a file that needs the package {name.partition('.')[0]}"
        raise DataError(source.path, got, "that package", f"pip install '.[{extra}]'") from None


def text_of(record: Record, source: Source, field: str) -> Text:
    """The text of a record. Raises DataError for a line that is no object with a text in `field`."""
    try:
        text, spoilt = record.raw.decode(), None
    except UnicodeDecodeError as error:
        text, spoilt = record.raw.decode(errors="replace"), _where(source, record, error.start)
    if source.form != ".jsonl" or not text.strip():
        return Text(text if source.form != ".jsonl" else "", spoilt)
    place = _where(source, record, 0)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(source.path, f"at {place} a line that is no JSON: {error}", "one JSON object per line") from None
    if not isinstance(value, dict) or field not in value:
        got = f"an object of {', '.join(value)[:160]}" if isinstance(value, dict) else type(value).__name__
        raise DataError(source.path, f"at {place} {got}", f"an object with a field {field}", "prepare.field=NAME")
    found = value[field]
    if found is not None and not isinstance(found, str):
        raise DataError(source.path, f"at {place} a {type(found).__name__} in the field {field}", "a text", "prepare.field=NAME")
    return _whole(found or "", spoilt, place)


def _whole(text: str, spoilt: str | None, place: str) -> Text:
    """JSON can name half a character (a lone surrogate), which no UTF-8 holds: spoilt as well."""
    mended = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return Text(mended, spoilt if mended == text else spoilt or place)


def _where(source: Source, record: Record, byte: int) -> str:
    if source.form == ".parquet":
        return f"row {record.place:,}"
    return f"byte {record.place + byte:,}{' of the unpacked file' if source.packing else ''}"

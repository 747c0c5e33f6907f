"""Token files in Megatron's .bin/.idx layout, and a corpus of equal windows over them.

Reads and writes the files that it is given; numpy only, no torch. Nothing here grows with the data except pages of the
memory maps, which the operating system takes back when it needs them.

    .idx   magic "MMIDIDX\\0\\0", version (uint64), dtype code (uint8), sequences (uint64), documents + 1 (uint64),
           lengths in tokens (int32 each), offsets into .bin in bytes (int64 each), first sequence of each document (int64 each) and the end
    .bin   the tokens of all sequences, one after the other, little-endian
"""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from framework.base.errors import DataError
from framework.base.files import fsync_folder
from framework.data.order import positions

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
MEGATRON_UINT16_LIMIT = 65_500
CHUNK_BYTES = 1 << 24
SAMPLED_BLOCKS = 256
SAMPLED_BLOCK_BYTES = 4096


def dtype_for(vocab_size: int) -> np.dtype:
    """Megatron's rule for the type of a token file: uint16 for vocabularies under 65,500, int32 above."""
    return np.dtype("<u2" if vocab_size < MEGATRON_UINT16_LIMIT else "<i4")


class TokenFile:
    """One .bin/.idx pair, memory-mapped. Opening reads the header and a few numbers, whatever the size.

    Survives pickling (to a worker process) as its path: the other side maps the files again.
    Raises DataError when a file is missing, empty, truncated, of another format, or holds floats.
    """

    def __init__(self, path_without_suffix: str) -> None:
        self.path = path_without_suffix
        self.bin_path, self.idx_path = f"{path_without_suffix}.bin", f"{path_without_suffix}.idx"
        self._check_presence()
        self.dtype, sequences, documents = _read_header(self.idx_path)
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * sequences
        documents_at = offsets_at + 8 * sequences
        _check_size(self.idx_path, documents_at + 8 * documents, "its header")
        lengths = np.memmap(self.idx_path, np.dtype("<i4"), "r", lengths_at, (sequences,))
        self._offsets = np.asarray(np.memmap(self.idx_path, np.dtype("<i8"), "r", offsets_at, (sequences,)))
        self._documents = np.asarray(np.memmap(self.idx_path, np.dtype("<i8"), "r", documents_at, (documents,)))
        end = int(self._offsets[-1]) + int(lengths[-1]) * self.dtype.itemsize
        if self._offsets[0] != 0 or self._documents[0] != 0 or self._documents[-1] != sequences or end <= 0:
            raise DataError(self.idx_path, "an index that does not begin at 0 and end at the last sequence", "a whole .idx file")
        _check_size(self.bin_path, end, self.idx_path)
        self.num_tokens = end // self.dtype.itemsize
        # Plain views: slicing the memmap class itself costs more than the read of a short sample.
        self.tokens = np.asarray(np.memmap(self.bin_path, self.dtype, "r", 0, (self.num_tokens,)))

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.path,)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    @property
    def document_starts(self) -> np.ndarray:
        """Offset of each document's first token: int64 [documents], made anew at each call (8 bytes per document)."""
        first = np.asarray(self._documents[:-1])
        starts = self._offsets[np.minimum(first, len(self._offsets) - 1)] // self.dtype.itemsize
        # Empty documents at the very end name a sequence that does not exist.
        return np.where(first < len(self._offsets), starts, self.num_tokens)

    def documents_between(self, start: int, stop: int) -> np.ndarray:
        """Offset of the first token of each document that begins in [start, stop): int64 [n], rising; an empty document has the next one's.

        Found in the map by halving: numpy's own search would copy the whole index first, because it is not aligned.
        """
        offsets, documents, width = self._offsets, self._documents, self.dtype.itemsize
        first = bisect_left(offsets, start * width)
        behind = bisect_left(offsets, stop * width, lo=first)
        begin = bisect_left(documents, first)
        return offsets[documents[begin : bisect_left(documents, behind, lo=begin)]] // width

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as a read-only view of the map, in the file's dtype: [count]."""
        assert start >= 0, f"token {start}"
        assert start + count <= self.num_tokens, f"[{start}, {start + count}) of {self.num_tokens} tokens"
        return self.tokens[start : start + count]

    def _check_presence(self) -> None:
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                stem, suffix = os.path.splitext(self.path)
                hint = stem if suffix in (".bin", ".idx") else "the path of a pair of files, without .bin or .idx"
                raise DataError(path, "no such file", "a pair of files .bin and .idx in Megatron's layout", hint)
            if os.path.getsize(path) == 0:
                raise DataError(path, "an empty file", "a pair of files .bin and .idx in Megatron's layout")


def _read_header(path: str) -> tuple[np.dtype, int, int]:
    """Dtype, number of sequences, and length of the document index, from the head of an .idx file."""
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise DataError(path, f"a file that begins with {head[: len(MAGIC)]!r}", f"Megatron's index, which begins with {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(path, f"a truncated file of {len(head)} bytes", f"at least {HEADER.size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(path, f"index version {version}", f"version {VERSION}")
    if code not in DTYPES:
        raise DataError(path, f"dtype code {code}", f"one of {sorted(DTYPES)}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        whole = ", ".join(np.dtype(name).name for name in DTYPES.values() if "f" not in name)
        raise DataError(path, f"dtype {dtype.name}", f"token ids, which are whole numbers: {whole}")
    if sequences == 0 or documents < 2:
        raise DataError(path, "an index without documents", "at least one document with one token")
    return dtype, sequences, documents


def _check_size(path: str, expected: int, source: str) -> None:
    size = os.path.getsize(path)
    if size != expected:
        got = f"{size:,} bytes" + (", a truncated file" if size < expected else "")
        raise DataError(path, got, f"{expected:,} bytes according to {source}", "the whole file: copy or prepare it again")


def write_tokens(prefix: Path, documents: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Write `documents` (each int [tokens], streamed) as prefix.bin and prefix.idx.

    Both are complete or absent: temporary names, flushed to disk, .bin renamed first and .idx last, so that whoever sees .idx
    may open the pair. Raises DataError when a token does not fit `dtype` or there is no token at all.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    final = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in final]
    try:
        with open(temporary[0], "wb") as file:
            lengths = _write_documents(file, documents, dtype, str(final[0]))
            _flush(file)
        with open(temporary[1], "wb") as file:
            write_index(file, np.frombuffer(lengths, np.int32), dtype)
            _flush(file)
        for source, target in zip(temporary, final, strict=True):
            os.replace(source, target)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
    fsync_folder(prefix.parent)


def _write_documents(file: BinaryIO, documents: Iterable[np.ndarray], dtype: np.dtype, subject: str) -> array[int]:
    """Append all tokens to `file`; returns the length of each document, four bytes each."""
    lengths = array("i")
    limits = np.iinfo(dtype)
    for document in documents:
        ids = np.asarray(document)
        if ids.size and not (limits.min <= ids.min() and ids.max() <= limits.max):
            raise DataError(subject, f"token ids from {ids.min()} to {ids.max()}", f"{limits.min} to {limits.max} ({dtype.name})")
        file.write(ids.astype(dtype).tobytes())
        lengths.append(ids.size)
    if sum(lengths) == 0:
        raise DataError(subject, "a corpus without a single token", "at least one token")
    return lengths


def write_index(file: BinaryIO, lengths: np.ndarray, dtype: np.dtype) -> None:
    """One sequence per document, as Megatron's own tools write."""
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * dtype.itemsize, out=offsets[1:])
    file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
    file.write(lengths.astype("<i4").tobytes())
    file.write(offsets.astype("<i8").tobytes())
    file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class Corpus:
    """Spans of token files as one row of samples, each `seq_length` tokens and the token after them.

    Sample k of a span covers its tokens [k * seq_length, k * seq_length + seq_length + 1): neighbours share one token, which is
    the target of one and the first input of the other. A sample never straddles two spans; what is left at a span's end is
    not read. `spans` are [start, stop) in tokens, one per file; None: whole files. `apart`: documents in a sample are to know nothing
    of each other.
    """

    def __init__(
        self, files: Sequence[TokenFile], seq_length: int, spans: Sequence[tuple[int, int]] | None = None, apart: bool = False
    ) -> None:
        self.files, self.seq_length, self.apart = tuple(files), seq_length, apart
        self.spans = tuple(spans) if spans is not None else tuple((0, file.num_tokens) for file in files)
        self.dtype = np.result_type(*(file.dtype for file in self.files))
        self._windows = [_windows(file, span, seq_length) for file, span in zip(self.files, self.spans, strict=True)]
        # First sample of each file, and the number of all samples behind the last: [files + 1].
        self._first = np.concatenate([[0], np.cumsum([len(windows) for windows in self._windows])]).astype(np.int64)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.files, self.seq_length, self.spans, self.apart)

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, positions: np.ndarray) -> np.ndarray:
        """The samples at `positions` (int64 [n], each in 0..len-1): [n, seq_length + 1], in the smallest type that holds all files'."""
        if len(self.files) == 1:
            return self._windows[0][positions]
        out = np.empty((len(positions), self.seq_length + 1), self.dtype)
        owners = np.searchsorted(self._first, positions, side="right") - 1
        for owner in np.unique(owners):
            rows = owners == owner
            out[rows] = self._windows[owner][positions[rows] - self._first[owner]]
        return out

    def read_starts(self, positions: np.ndarray) -> np.ndarray:
        """Of each token of those samples the place in its sample at which its document begins: int32 [n, seq_length + 1]; 0 where that
        was before the sample."""
        out = np.zeros((len(positions), self.seq_length + 1), np.int32)
        owners = np.searchsorted(self._first, positions, side="right") - 1
        for row, owner in enumerate(owners):
            start = self.spans[owner][0] + int(positions[row] - self._first[owner]) * self.seq_length
            places = self.files[owner].documents_between(start, start + self.seq_length + 1) - start
            out[row, places] = places
        return np.maximum.accumulate(out, axis=1)

    def places(self, indices: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
        """Where the samples with the global `indices` lie, as positions for `read` (both int64 [n])."""
        return positions(indices, len(self), seed, shuffle)

    def shares(self, samples: int) -> list[tuple[str, float, float]]:
        """Of the first `samples` samples: (name, share, epochs) of each corpus that takes turns with others; none where there is one."""
        return []

    def file_of(self, position: int) -> TokenFile:
        """The file that holds the sample at `position`."""
        return self.files[int(np.searchsorted(self._first, position, side="right")) - 1]

    def fingerprint(self) -> str:
        """xxh3_128 (hex) over sample length, spans, `apart`, dtypes, sizes, all .idx bytes and up to 1 MiB spread over each .bin.

        Tells other data apart without reading all of it; paths do not count, so a moved corpus keeps its fingerprint.
        """
        digest = xxhash.xxh3_128(str((self.seq_length, self.spans)).encode())
        if self.apart:  # a corpus whose documents are joined keeps the fingerprint that it had before there was a choice
            digest.update(b"apart")
        for file in self.files:
            digest.update(f"{file.dtype.str} {file.num_tokens}".encode())
            with open(file.idx_path, "rb") as index:
                while chunk := index.read(CHUNK_BYTES):
                    digest.update(chunk)
            with open(file.bin_path, "rb") as tokens:
                last = max(0, os.path.getsize(file.bin_path) - SAMPLED_BLOCK_BYTES)
                for block in range(SAMPLED_BLOCKS):
                    tokens.seek(last * block // (SAMPLED_BLOCKS - 1))
                    digest.update(tokens.read(SAMPLED_BLOCK_BYTES))
        return digest.hexdigest()


def _windows(file: TokenFile, span: tuple[int, int], seq_length: int) -> np.ndarray:
    """All samples of a span as a view that copies nothing: [samples, seq_length + 1] in the file's dtype."""
    tokens = file.read(span[0], span[1] - span[0])
    if len(tokens) <= seq_length:
        return np.empty((0, seq_length + 1), file.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_length + 1)[::seq_length]

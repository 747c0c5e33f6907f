"""framework/data/tokens.py against bytes that struct packs here, and against plain slicing."""

from __future__ import annotations

import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from framework.base.errors import DataError
from framework.data.tokens import Corpus, TokenFile, dtype_for, write_index, write_tokens

# Megatron's dtype codes with the letters that struct knows them by.
WHOLE = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def pack_index(code: int, lengths: list[int], documents: list[int], item: int, version: int = 1) -> bytes:
    """An .idx file by the book: sequences of `lengths` tokens, `documents` = first sequence of each document and the end."""
    offsets = [sum(lengths[:i]) * item for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(documents)}q", *lengths, *offsets, *documents)


def put(folder: Path, code: int = 8, letter: str = "H", version: int = 1) -> Path:
    """A pair of files with DOCUMENTS; returns the path without suffix."""
    flat = [token for document in DOCUMENTS for token in document]
    prefix = folder / "corpus"
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
    Path(f"{prefix}.idx").write_bytes(pack_index(code, [3, 1, 4], [0, 1, 2, 3], struct.calcsize(letter), version))
    return prefix


@pytest.mark.parametrize("code", WHOLE)
def test_reads_every_whole_number_type(tmp_path: Path, code: int) -> None:
    file = TokenFile(str(put(tmp_path, code, WHOLE[code])))
    assert file.read(0, 8).tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert file.read(3, 2).tolist() == [8, 9]
    assert (file.num_tokens, file.num_documents, file.document_starts.tolist()) == (8, 3, [0, 3, 4])
    assert file.dtype.itemsize == struct.calcsize(WHOLE[code])


@pytest.mark.parametrize(("dtype", "code", "letter"), [("uint8", 1, "B"), ("uint16", 8, "H"), ("int32", 4, "i"), ("int64", 5, "q")])
def test_writes_the_same_bytes(tmp_path: Path, dtype: str, code: int, letter: str) -> None:
    (tmp_path / "ours").mkdir()
    write_tokens(tmp_path / "ours" / "corpus", (np.array(document) for document in DOCUMENTS), np.dtype(dtype))
    theirs = put(tmp_path, code, letter)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / "ours" / f"corpus{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    prefix = put(tmp_path)
    # Sequences of 3, 1, 4 tokens; documents: the first two, none, the third, none.
    Path(f"{prefix}.idx").write_bytes(pack_index(8, [3, 1, 4], [0, 2, 2, 3, 3], 2))
    file = TokenFile(str(prefix))
    assert (file.num_documents, file.document_starts.tolist()) == (4, [0, 4, 4, 8])


def test_starts_of_documents_are_those_that_a_plain_walk_finds(tmp_path: Path) -> None:
    """Documents of several sequences and of none, at the beginning, in a row, across samples and at the end; two spans, two files."""
    generator = np.random.default_rng(1)
    files = []
    for number, (empty_first, documents) in enumerate([(True, 40), (False, 23)]):
        lengths = generator.integers(0, 5, 90).tolist()
        first = sorted(generator.choice(90, documents, replace=True).tolist())  # the same twice: an empty document between
        first = [0, 0, *first, 90, 90] if empty_first else [0, *first, 90]
        prefix = tmp_path / f"{number}"
        Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{sum(lengths)}H", *range(sum(lengths))))
        Path(f"{prefix}.idx").write_bytes(pack_index(8, lengths, first, 2))
        files.append(TokenFile(str(prefix)))
    spans = [(7, files[0].num_tokens - 3), (0, files[1].num_tokens)]
    corpus = Corpus(files, 6, spans, apart=True)
    wanted = []
    for file, (begin, end) in zip(files, spans, strict=True):
        starts = set(file.document_starts.tolist())
        for start in range(begin, end - 6, 6):
            row, document = [], 0
            for place in range(7):
                document = place if start + place in starts else document
                row.append(document)
            wanted.append(row)
    everything = np.arange(len(corpus))
    assert corpus.read_starts(everything).tolist() == wanted
    assert corpus.read_starts(everything[::-3]).tolist() == wanted[::-3]
    assert pickle.loads(pickle.dumps(corpus)).read_starts(everything).tolist() == wanted


def test_starts_are_found_without_a_copy_of_the_index(tmp_path: Path) -> None:
    """Two million documents, whose starts alone are 16 MB."""
    count = 2_000_000
    Path(f"{tmp_path / 'many'}.bin").write_bytes(bytes(3 * count))
    with open(tmp_path / "many.idx", "wb") as index:
        write_index(index, np.full(count, 3, np.int32), np.dtype("uint8"))
    corpus = Corpus([TokenFile(str(tmp_path / "many"))], 8, apart=True)
    tracemalloc.start()
    try:
        rows = corpus.read_starts(np.array([0, 1, 250_000, len(corpus) - 1]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    for position, row in zip([0, 1, 250_000, len(corpus) - 1], rows.tolist(), strict=True):
        assert row == [max(0, (8 * position + place) // 3 * 3 - 8 * position) for place in range(9)]


def test_names_with_dots_keep_them(tmp_path: Path) -> None:
    write_tokens(tmp_path / "v1.5.text", [np.array([1, 2])], np.dtype("uint16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v1.5.text.bin", "v1.5.text.idx"]
    assert TokenFile(str(tmp_path / "v1.5.text")).num_tokens == 2


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_size_that_disagrees_is_refused(tmp_path: Path, suffix: str, change: int) -> None:
    prefix = put(tmp_path)
    path = Path(f"{prefix}{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"x")
    with pytest.raises(DataError) as caught:
        TokenFile(str(prefix))
    assert caught.value.subject == str(path)
    assert f"{len(content)} bytes" in caught.value.expected
    assert ("truncated" in str(caught.value)) == (change < 0)


@pytest.mark.parametrize("keep", range(0, 34, 3))
def test_a_header_cut_anywhere_is_refused(tmp_path: Path, keep: int) -> None:
    prefix = put(tmp_path)
    index = Path(f"{prefix}.idx")
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(DataError, match="empty" if keep == 0 else "truncated"):
        TokenFile(str(prefix))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_and_empty_files_are_refused(tmp_path: Path, suffix: str) -> None:
    prefix = put(tmp_path)
    path = Path(f"{prefix}{suffix}")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty") as caught:
        TokenFile(str(prefix))
    assert caught.value.subject == str(path)
    path.unlink()
    with pytest.raises(DataError, match="no such file") as caught:
        TokenFile(str(prefix))
    assert caught.value.subject == str(path)


def test_a_path_with_its_suffix_is_answered_with_the_right_one(tmp_path: Path) -> None:
    prefix = put(tmp_path)
    with pytest.raises(DataError) as caught:
        TokenFile(f"{prefix}.bin")
    assert caught.value.write == str(prefix)


def test_another_format_version_or_type_is_refused(tmp_path: Path) -> None:
    prefix = put(tmp_path, version=2)
    with pytest.raises(DataError, match="version 2"):
        TokenFile(str(prefix))
    for code, name in ((6, "float64"), (7, "float32"), (9, "code 9"), (0, "code 0")):
        put(tmp_path, code, "d")
        with pytest.raises(DataError, match=name):
            TokenFile(str(prefix))
    Path(f"{prefix}.idx").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match="begins with"):
        TokenFile(str(prefix))


def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    prefix = put(tmp_path)
    for documents in ([1, 2, 3], [0, 1, 2]):
        Path(f"{prefix}.idx").write_bytes(pack_index(8, [3, 1, 4], documents, 2))
        with pytest.raises(DataError, match="last sequence"):
            TokenFile(str(prefix))
    Path(f"{prefix}.idx").write_bytes(pack_index(8, [], [0], 2))
    with pytest.raises(DataError, match="without documents"):
        TokenFile(str(prefix))


def test_reads_beyond_32_bits(tmp_path: Path) -> None:
    prefix = tmp_path / "large"
    length = 2**31 - 1
    Path(f"{prefix}.idx").write_bytes(pack_index(1, [length] * 3, [0, 1, 2, 3], 1))
    with open(f"{prefix}.bin", "wb") as file:  # sparse: holds a few kilobytes on disk
        file.seek(2**32 + 4)
        file.write(bytes([7, 8, 9]))
        file.truncate(3 * length)
    tokens = TokenFile(str(prefix))
    assert tokens.num_tokens == 3 * length
    assert tokens.document_starts.tolist() == [0, length, 2 * length]
    assert tokens.read(2**32 + 3, 5).tolist() == [0, 7, 8, 9, 0]
    corpus = Corpus([tokens], 4)
    assert corpus.read(np.array([2**30 + 1, 0])).tolist() == [[7, 8, 9, 0, 0], [0, 0, 0, 0, 0]]


def test_opening_costs_no_memory_whatever_the_size(tmp_path: Path) -> None:
    prefix, sequences = tmp_path / "many", 100_000_000
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1))
        file.seek(34 + 4 * sequences - 4)
        file.write(struct.pack("<i", 50))
        file.seek(34 + 20 * sequences)
        file.write(struct.pack("<q", sequences))
    Path(f"{prefix}.bin").write_bytes(bytes(100))
    tracemalloc.start()
    corpus = Corpus([TokenFile(str(prefix))], 10)
    assert len(corpus) == 4
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_pickles_as_a_path(tmp_path: Path) -> None:
    corpus = Corpus([TokenFile(str(put(tmp_path)))], 3, [(1, 8)])
    content = pickle.dumps(corpus)
    assert len(content) < 1000 + len(str(tmp_path))
    again = pickle.loads(content)
    assert again.read(np.array([1])).tolist() == [[9, 10, 11, 12]]
    assert again.fingerprint() == corpus.fingerprint()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[np.ndarray]:
        yield np.array([1, 2])
        raise ValueError("the source failed")

    with pytest.raises(ValueError, match="the source failed"):
        write_tokens(tmp_path / "corpus", broken(), np.dtype("uint16"))
    with pytest.raises(DataError, match="65536"):
        write_tokens(tmp_path / "corpus", [np.array([1, 65536])], np.dtype("uint16"))
    with pytest.raises(DataError, match="-1"):
        write_tokens(tmp_path / "corpus", [np.array([-1])], np.dtype("uint16"))
    with pytest.raises(DataError, match="without a single token"):
        write_tokens(tmp_path / "corpus", [np.array([], int)], np.dtype("uint16"))
    assert list(tmp_path.iterdir()) == []


def test_dtype_rule_of_megatron() -> None:
    assert [dtype_for(size).name for size in (256, 65_499, 65_500, 131_072)] == ["uint16", "uint16", "int32", "int32"]


def write_range(prefix: Path, start: int, stop: int) -> TokenFile:
    write_tokens(prefix, [np.arange(start, stop)], np.dtype("int32"))
    return TokenFile(str(prefix))


def test_samples_equal_plain_slices(tmp_path: Path) -> None:
    files = [write_range(tmp_path / "a", 0, 23), write_range(tmp_path / "b", 100, 104), write_range(tmp_path / "c", 200, 217)]
    spans = [(2, 23), (0, 4), (0, 17)]
    corpus = Corpus(files, 5, spans)
    expected = []
    for first, (start, stop) in zip((0, 100, 200), spans, strict=True):
        tokens = list(range(first + start, first + stop))
        expected += [tokens[k : k + 6] for k in range(0, len(tokens), 5) if len(tokens[k : k + 6]) == 6]
    assert len(corpus) == len(expected) == 4 + 0 + 3
    asked = np.array([6, 0, 3, 3, 4])
    got = corpus.read(asked)
    assert got.tolist() == [expected[k] for k in asked]
    assert [corpus.file_of(k).path[-1] for k in (0, 3, 4, 6)] == ["a", "a", "c", "c"]


def test_files_of_several_types_are_read_in_one_that_holds_all(tmp_path: Path) -> None:
    """Neither -1 nor 65,535 may become another number."""
    write_tokens(tmp_path / "unsigned", [np.array([0, 65_535, 2])], np.dtype("uint16"))
    write_tokens(tmp_path / "signed", [np.array([-1, 1, 2])], np.dtype("int16"))
    corpus = Corpus([TokenFile(str(tmp_path / name)) for name in ("unsigned", "signed")], 2)
    assert corpus.read(np.array([1, 0])).tolist() == [[-1, 1, 2], [0, 65_535, 2]]


@pytest.mark.parametrize(("tokens", "samples"), [(5, 0), (6, 1), (10, 1), (11, 2)])
def test_a_sample_needs_its_last_target(tmp_path: Path, tokens: int, samples: int) -> None:
    assert len(Corpus([write_range(tmp_path / "a", 0, tokens)], 5)) == samples


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    file = write_range(tmp_path / "a", 0, 100)
    original = Corpus([file], 5).fingerprint()
    assert len(original) == 32
    (tmp_path / "elsewhere").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / "elsewhere" / f"z{suffix}")
    assert Corpus([TokenFile(str(tmp_path / "elsewhere" / "z"))], 5).fingerprint() == original
    write_tokens(tmp_path / "documents", [np.arange(0, 40), np.arange(40, 100)], np.dtype("int32"))
    write_tokens(tmp_path / "dtype", [np.arange(0, 100)], np.dtype("uint16"))
    write_tokens(tmp_path / "token", [np.where(np.arange(100) == 57, 3, np.arange(100))], np.dtype("int32"))
    others = [Corpus([file], 6), Corpus([file], 5, [(0, 99)]), Corpus([file, file], 5), Corpus([file], 5, apart=True)]
    others += [Corpus([TokenFile(str(tmp_path / name))], 5) for name in ("documents", "dtype", "token")]
    assert len({original, *(other.fingerprint() for other in others)}) == 8

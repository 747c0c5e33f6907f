"""framework/data/documents.py: the documents of every form and packing, in order, and a letter for each damage."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.base.errors import DataError
from framework.data.documents import CHUNK_BYTES, Record, find_sources, opened, text_of

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def texts(*patterns: str | Path, separator: bytes | None = None, field: str = "text") -> list[str]:
    found = []
    for source in find_sources([str(pattern) for pattern in patterns]):
        with opened(source) as reading:
            found += [text_of(Record(0, place, raw), source, field).text for place, raw in reading.pieces(separator, field)]
    return found


def raised(*patterns: str | Path, field: str = "text") -> DataError:
    with pytest.raises(DataError) as caught:
        texts(*patterns, field=field)
    return caught.value


@pytest.mark.parametrize("packing", PACK)
def test_every_packing_of_every_form(tmp_path: Path, packing: str) -> None:
    wanted = ["one\r\n", "", "zwei\ndrei é", "  "]
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in wanted)
    (tmp_path / f"a.jsonl{packing}").write_bytes(PACK[packing](lines.encode()))
    (tmp_path / f"b.TXT{packing}").write_bytes(PACK[packing](b"one\r\n"))
    assert texts(tmp_path / f"a.jsonl{packing}", tmp_path / f"b.TXT{packing}") == [*wanted, "one\r\n"]


def test_zstandard_with_several_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("zstandard")
    parts = [library.compress(b"one\n--\ntw"), library.compress(b"o")]
    (tmp_path / "a.txt.zst").write_bytes(b"".join(parts))
    assert texts(tmp_path / "a.txt.zst", separator=b"\n--\n") == ["one", "two"]


def test_parquet(tmp_path: Path) -> None:
    library, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    wanted = [f"text {number} é" for number in range(3000)]
    table = library.table({"body": [*wanted, None], "n": list(range(3001))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert texts(tmp_path / "a.parquet", tmp_path / "b.parquet.gz", field="body") == [*wanted, "", *wanted, ""]
    assert "no column text" in str(raised(tmp_path / "a.parquet").got)
    assert "int64" in str(raised(tmp_path / "a.parquet", field="n").got)
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    assert raised(tmp_path / "c.parquet").subject.endswith("c.parquet")


@pytest.mark.parametrize(("name", "library", "extra"), [("a.parquet", "pyarrow", "parquet"), ("a.txt.zst", "zstandard", "zstd")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str, extra: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, library, None)
    letter = raised(tmp_path / name)
    assert library in str(letter.got)
    assert letter.write == f"pip install '.[{extra}]'"


def test_separators_on_the_edge_of_a_read(tmp_path: Path) -> None:
    """Documents longer than a read, and separators that lie across two."""
    for shift in range(4):
        wanted = ["a" * (CHUNK_BYTES - shift), "b" * 5, "", "c" * (2 * CHUNK_BYTES)]
        (tmp_path / "a.txt").write_text("<|>".join(wanted) + "<|>")
        assert texts(tmp_path / "a.txt", separator=b"<|>") == wanted
    assert len(texts(tmp_path / "a.txt")) == 1


def test_places_are_bytes_of_the_unpacked_file(tmp_path: Path) -> None:
    lines = [b'{"text": "\xc3\xa9"}', b'{"text": "a\xe9b"}']
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    [source] = find_sources([str(tmp_path / "*.gz")])
    with opened(source) as reading:
        pieces = list(reading.pieces(None, "text"))
    first, second = (text_of(Record(0, place, raw), source, "text") for place, raw in pieces)
    assert (first.text, first.spoilt) == ("é", None)
    at = len(lines[0]) + 1 + lines[1].index(b"\xe9")
    assert (second.text, second.spoilt) == ("a\ufffdb", f"byte {at} of the unpacked file")


def test_half_a_character_in_json_is_spoilt(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude42"}\n')
    [source] = find_sources([str(tmp_path / "a.jsonl")])
    found = text_of(Record(0, 0, (tmp_path / "a.jsonl").read_bytes()), source, "text")
    assert (found.text, found.spoilt) == ("a\ufffdb 🙂", "byte 0")


def test_globs_and_urls_in_order(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for name in ("b.txt", "a.txt", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "b.txt", tmp_path / "**/d.txt") == ["b.txt", "c/d.txt"]
    memory = fsspec.filesystem("memory")
    for name in ("y", "x"):
        memory.pipe(f"/docs/{name}.txt.gz", gzip.compress(name.encode()))
    assert texts("memory://docs/*.txt.gz", tmp_path / "a.txt") == ["x", "y", "a.txt"]
    assert [source.path for source in find_sources(["memory://docs/*.gz"])] == ["memory:///docs/x.txt.gz", "memory:///docs/y.txt.gz"]
    assert raised("memory://docs/nothing.txt").subject == "memory://docs/nothing.txt"
    assert raised("nosuch://x/a.txt").subject == "nosuch://x/a.txt"


def test_files_that_cannot_be_used_are_letters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    (tmp_path / "no.txt.xz").write_bytes(b"x" * 100)
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text"\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 5}\n')
    for name, said in {
        "nothing*.txt": "no such file",
        "a.csv": "ends with .csv",
        "cut.txt.gz": "does not read to its end",
        "no.txt.xz": "does not read to its end",
        "bad.jsonl": "at byte 14 a line that is no JSON",
        "list.jsonl": "list",
        "other.jsonl": "an object of body",
        "number.jsonl": "a int in the field text",
    }.items():
        letter = raised(tmp_path / name)
        assert letter.subject == str(tmp_path / name)
        assert said in str(letter.got)
    assert raised(tmp_path).write == f"data.files=['{tmp_path}/*.jsonl']"
    assert "named twice" in str(raised(tmp_path / "a.txt", tmp_path / "*.txt").got)

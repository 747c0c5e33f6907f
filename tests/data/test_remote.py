"""framework/data/remote.py: texts behind http:// and s3://, on servers of this host, become what the same files become here;
connections that break, files that change and servers that go away are mended or a letter, after which the same command goes on."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import DataError, FrameworkError, RunError
from framework.config.compose import compose
from framework.config.schema import Data, Prepare
from framework.data import preparing, remote
from framework.data.documents import find_sources, opened
from framework.data.manifest import read_manifest
from framework.data.preparing import Prepared, prepare
from tests.s3 import BUCKET, s3_server

pytest.importorskip("aiohttp")

BLOCK = 1 << 16


@dataclass
class Site:
    """What a server has, and how it misbehaves. `cuts`: of the next answers with a body, after how many bytes of it the line is cut;
    `longest`: and after how many it always is. `sent` counts the bytes of all bodies."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    sized: bool = True
    longest: int = sys.maxsize
    cuts: list[int] = field(default_factory=list)
    etag: str = "one"
    sent: int = 0

    def answer(self, handler: BaseHTTPRequestHandler, head: bool) -> None:
        name = handler.path.partition("?")[0].lstrip("/")
        content = self.files.get(name)
        if not name:
            content = "".join(f'<a href="/{each}">{each}</a>' for each in self.files).encode()
        if content is None:
            handler.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", "")) if self.ranges else None
        body = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        handler.send_response(206 if asked else 200)
        handler.send_header("Content-Type", "application/octet-stream" if name else "text/html")
        handler.send_header("ETag", self.etag)
        if asked:
            handler.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(body) - 1}/{len(content)}")
        if self.sized:
            handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Connection", "close")
        handler.end_headers()
        if not head:
            end = self.cuts.pop(0) if self.cuts and name else min(self.longest, len(body))
            for start in range(0, min(end, len(body)), BLOCK):
                handler.wfile.write(body[start : min(end, start + BLOCK)])
                self.sent += min(end, start + BLOCK, len(body)) - start


@pytest.fixture
def site() -> Iterator[Site]:
    shown = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                shown.answer(self, False)
            except OSError:
                self.close_connection = True  # the reader has enough

        def do_HEAD(self) -> None:
            shown.answer(self, True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shown.url = f"http://127.0.0.1:{server.server_port}"
    yield shown
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests of little each, many parts, and no pauses to speak of."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(remote, "PAUSE_S", 0.001)
    monkeypatch.setattr(preparing, "BATCH_BYTES", BLOCK // 2)


def lines(count: int, seed: int = 1) -> bytes:
    """Documents of random letters, which do not pack well: about 800 bytes each."""
    draw = random.Random(seed)
    return b"".join(json.dumps({"text": draw.randbytes(400).hex()}).encode() + b"\n" for _ in range(count))


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def made(out: Path, *patterns: str, workers: int = 1, **settings: Any) -> Prepared:
    data = Data(kind="text", files=patterns, tokenizer="bytes")
    return prepare(data, Prepare(out=str(out), part_mib=0.1, **settings), workers, lambda progress: None)


def facts(prepared: Prepared) -> dict[str, Any]:
    """What a manifest says but for where the files were."""
    manifest = {key: value for key, value in prepared.manifest.items() if key != "job"}
    return {**manifest, "files": [{**file, "path": Path(file["path"]).name} for file in manifest["files"]]}


def forms() -> dict[str, bytes]:
    """The same kind of documents in every form and packing that this machine can read."""
    files = {f"a.jsonl{end}": pack(lines(300, at)) for at, (end, pack) in enumerate(PACK.items())}
    files["b.txt.gz"] = gzip.compress(b"one|two|three")
    try:
        import zstandard

        files["c.jsonl.zst"] = zstandard.compress(lines(300, 8))
    except ImportError:
        pass
    return files


PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("way", ["ranges", "no ranges", "no sizes", "cut lines"])
def test_every_packing_behind_http_becomes_what_it_becomes_here(way: str, site: Site, tmp_path: Path) -> None:
    site.files = forms()
    site.ranges, site.sized = way in ("ranges", "cut lines"), way != "no sizes"
    put(tmp_path, site.files)
    here = made(tmp_path / "here", str(tmp_path / "*.*"), separator="|")
    if way == "cut lines":
        site.cuts = [1000, 0, sys.maxsize, BLOCK // 2, 7, sys.maxsize, 0, 0, 0, 9, sys.maxsize]
    there = made(tmp_path / "there", f"{site.url}/*.*", separator="|", workers=2)
    wanted = facts(here)
    if way == "no sizes":
        wanted["files"] = [{**file, "size": 0} for file in wanted["files"]]
    assert facts(there) == wanted
    assert there.manifest["xxh3_128"] == here.manifest["xxh3_128"]
    for end in ("bin", "idx"):
        assert (tmp_path / f"there.{end}").read_bytes() == (tmp_path / f"here.{end}").read_bytes()
    assert not site.cuts


def test_a_line_that_never_holds_for_long_is_asked_for_less(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(remote, "LEAST_BYTES", 1 << 14)
    site.files, site.longest = {"a.txt": lines(3000)}, 150_000
    [source] = find_sources([f"{site.url}/a.txt"])
    with opened(source) as reading:
        assert list(reading.pieces(None, "text")) == [(0, site.files["a.txt"])]


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_only_what_is_wanted_is_fetched(packing: str, site: Site) -> None:
    site.files = {f"a.jsonl{packing}": PACK[packing](lines(4000))}
    whole = len(site.files[f"a.jsonl{packing}"])
    [source] = find_sources([f"{site.url}/a.jsonl{packing}"])
    assert (source.size, site.sent) == (whole, 0)
    with opened(source) as reading:
        next(reading.pieces(None, "text"))
        assert reading.done <= 2 << 20
    assert 0 < site.sent < whole


def test_a_column_of_parquet_is_fetched_alone(site: Site, tmp_path: Path) -> None:
    library, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(3)
    rows = {"text": [f"text {number} é" for number in range(3000)], "other": [draw.randbytes(900) for _ in range(3000)]}
    parquet.write_table(library.table(rows), tmp_path / "a.parquet", row_group_size=1000)
    site.files = {"a.parquet": (tmp_path / "a.parquet").read_bytes()}
    site.cuts = [5, 0, 100]
    here, there = made(tmp_path / "here", str(tmp_path / "a.parquet")), made(tmp_path / "there", f"{site.url}/a.parquet")
    assert facts(there) == facts(here)
    assert site.sent < len(site.files["a.parquet"]) / 2
    site.ranges = False
    with pytest.raises(DataError) as caught:
        made(tmp_path / "again", f"{site.url}/a.parquet")
    assert "from their beginning only" in str(caught.value.got)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_after_a_server_that_went_away_the_same_command_goes_on(name: str, site: Site, tmp_path: Path) -> None:
    site.files = {name: PACK[name.removeprefix("a.jsonl")](lines(4000))}
    put(tmp_path, site.files)
    here = made(tmp_path / "here", str(tmp_path / name))
    site.cuts = [sys.maxsize] * 20 + [100] + [0] * 100
    with pytest.raises(RunError) as caught:
        made(tmp_path / "there", f"{site.url}/{name}")
    assert caught.value.subject == f"{site.url}/{name}"
    broke = re.match(r"a connection that broke at byte ([\d,]+), and did again", str(caught.value.got))
    assert broke is not None
    assert BLOCK < int(broke[1].replace(",", "")) < site.sent
    assert caught.value.write == "the same command again, to go on"
    parts = (tmp_path / "there.partial/journal.jsonl").read_text().splitlines()
    assert len(parts) > 1
    site.cuts = []
    assert facts(made(tmp_path / "there", f"{site.url}/{name}?signed=again")) == facts(here)


def test_a_file_that_changes_while_it_is_read_is_not_mixed(site: Site, tmp_path: Path) -> None:
    site.files = {"a.jsonl": lines(1000)}
    site.cuts = [sys.maxsize, sys.maxsize, 10]
    answer = site.answer

    def changing(handler: BaseHTTPRequestHandler, head: bool) -> None:
        if len(site.cuts) == 1:
            site.etag = "two"
        answer(handler, head)

    site.answer = changing  # type: ignore[method-assign]
    with pytest.raises(DataError, match="another file than at the start"):
        made(tmp_path / "out", f"{site.url}/a.jsonl")
    with pytest.raises(FrameworkError, match="a file was another"):
        made(tmp_path / "out", f"{site.url}/a.jsonl")


def test_what_is_not_there_is_a_letter_before_anything_begins(site: Site, tmp_path: Path) -> None:
    site.files = {"a.jsonl": b'{"text": "x"}\n', "a.csv": b"x"}
    nowhere = "http://127.0.0.1:9/a.jsonl"
    for url, said in {f"{site.url}/b.jsonl": "404", f"{site.url}/*.txt": "no such file", nowhere: "Cannot connect"}.items():
        with pytest.raises(DataError) as caught:
            made(tmp_path / "out", url)
        assert (caught.value.subject, said in str(caught.value.got)) == (url, True)
    with pytest.raises(DataError, match=r"ends with \.csv"):
        made(tmp_path / "out", f"{site.url}/a.csv?x=.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote, "_system", missing)
    with pytest.raises(DataError) as caught:
        find_sources(["s3://bucket/a.jsonl"])
    assert caught.value.write == "pip install '.[s3]'"


def test_signatures_are_kept_out_of_what_is_written(site: Site, tmp_path: Path) -> None:
    site.files = {"a.jsonl": lines(3)}
    made(tmp_path / "out", f"{site.url}/a.jsonl?key=secret")
    assert [file["path"] for file in (read_manifest(tmp_path / "out") or {})["files"]] == [f"{site.url}/a.jsonl"]
    assert made(tmp_path / "out", f"{site.url}/a.jsonl?key=other").again


def test_urls_are_words_of_the_command_line() -> None:
    files = ["s3://bucket/folder/*.jsonl.gz", "https://host:80/a%20b.jsonl?x=1&y=2"]
    assert compose(["data=text", f"data.files=['{files[0]}','{files[1]}']"]).data.files == tuple(files)
    assert compose(["data=text", "data.files=[s3://bucket/a.jsonl,https://host/b.txt.gz]"]).data.files[1] == "https://host/b.txt.gz"


def test_files_behind_s3_become_what_they_become_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = forms()
    put(tmp_path, files)
    here = made(tmp_path / "here", str(tmp_path / "*.*"), separator="|")
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        system = s3fs.S3FileSystem()
        for name, content in files.items():
            system.pipe_file(f"{BUCKET}/texts/{name}", content)
        there = made(tmp_path / "there", f"s3://{BUCKET}/texts/*.*", separator="|", workers=2)
        assert facts(there) == facts(here)
        assert there.manifest["files"][0]["path"] == f"s3://{BUCKET}/texts/a.jsonl"
        assert (tmp_path / "there.bin").read_bytes() == (tmp_path / "here.bin").read_bytes()
        [source] = find_sources([f"s3://{BUCKET}/texts/a.jsonl"])
        with opened(source) as reading:
            file = reading._file
            assert file.read(BLOCK) == files["a.jsonl"][:BLOCK]
            system.pipe_file(f"{BUCKET}/texts/a.jsonl", lines(299))
            file._let_go()  # type: ignore[attr-defined]  (as a connection that breaks does)
            with pytest.raises(DataError, match="another file"):
                file.read(BLOCK)
    with pytest.raises(DataError, match="can be reached"):
        find_sources([f"s3://{BUCKET}/texts/a.jsonl"])

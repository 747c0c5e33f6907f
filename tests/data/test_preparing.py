"""framework.prepare: what becomes of every document, the same for any number of workers and after a kill, whole or absent."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash

from framework.base.errors import ConfigError, DataError, RunError, StartError
from framework.config.schema import Data, Prepare
from framework.data import encoding, preparing
from framework.data.documents import find_sources
from framework.data.encoding import Batch, Pool, Work
from framework.data.manifest import read_manifest
from framework.data.pace import clock, summary
from framework.data.prepare import open_corpora
from framework.data.preparing import Prepared, prepare
from framework.data.tokenizer import ByteTokenizer
from framework.data.tokens import TokenFile

ROOT = Path(__file__).resolve().parents[2]
TOPICS = list(dict.fromkeys(text for _, text in sorted(pydoc_data.topics.topics.items())))  # two of them are the same


def made(folder: Path, *patterns: str, workers: int = 1, tokenizer: str = "bytes", **settings: Any) -> Prepared:
    data = Data(kind="text", files=tuple(str(folder / pattern) for pattern in patterns), tokenizer=tokenizer)
    return prepare(data, Prepare(**{"out": str(folder / "out"), **settings}), workers, lambda progress: None)


def documents(prefix: Path) -> list[bytes]:
    """The documents of a token file of bytes, each of which is a sequence of its own."""
    file = TokenFile(str(prefix))
    starts = [*file.document_starts.tolist(), file.num_tokens]
    return [file.read(start, stop - start).astype(np.uint8).tobytes() for start, stop in itertools.pairwise(starts)]


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("out.bin", "out.idx", "out.json")}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches and parts of little text."""
    monkeypatch.setattr(preparing, "BATCH_BYTES", 10_000)


@pytest.mark.usefixtures("small_batches")
def test_documents_come_out_as_they_went_in(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", TOPICS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("zwei\n\ndrei é\n\nvier".encode()))
    manifest = made(tmp_path, "a.txt.gz", "*.jsonl", separator="\\n\\n").manifest
    wanted = ["zwei", "drei é", "vier", *TOPICS]
    assert documents(tmp_path / "out") == [text.encode() for text in wanted]
    size = sum(len(text.encode()) for text in wanted)
    counts = {"read": len(wanted), "documents": len(wanted), "tokens": size, "bytes": size}
    assert manifest["totals"] == {**counts, "empty": 0, "bad_utf8": 0, "over_long": 0, "duplicates": 0}
    assert [file["documents"] for file in manifest["files"]] == [3, len(TOPICS)]
    assert not (tmp_path / "out.partial").exists()
    for name in ("bin", "idx"):
        assert xxhash.xxh3_128_hexdigest((tmp_path / f"out.{name}").read_bytes()) == manifest["xxh3_128"][name]


@pytest.mark.usefixtures("small_batches")
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TOPICS[:9], trainer)
    inner.save(str(tmp_path / "tokenizer.json"))
    write_lines(tmp_path / "a.jsonl", [*TOPICS, "", *TOPICS[::-1]])
    found = []
    for workers in (1, 2, 4):
        made(tmp_path, "a.jsonl", workers=workers, tokenizer=str(tmp_path), dedup=True)
        found.append(contents(tmp_path))
        for name in found[-1]:
            (tmp_path / name).unlink()
    assert found[0] == found[1] == found[2]
    file = tmp_path / "out.bin"
    file.write_bytes(found[0]["out.bin"])
    expected = [number for text in TOPICS for number in (*inner.encode(text).ids, 0)]
    assert np.fromfile(file, "<u2").tolist() == expected


def test_what_becomes_of_every_document_that_is_not_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good|bad \xe9 one||good|much too long|x")
    (tmp_path / "b.txt").write_bytes(b"good|fine")
    common: dict[str, Any] = {"separator": "|", "max_tokens": 9}
    with pytest.raises(DataError) as caught:
        made(tmp_path, "*.txt", **common)
    assert (caught.value.subject, caught.value.got) == (str(tmp_path / "a.txt"), "at byte 9 what is not UTF-8")
    assert not (tmp_path / "out.idx").exists()
    one = made(tmp_path, "*.txt", **common, bad_utf8="skip", dedup=True, out=str(tmp_path / "one"))
    assert documents(tmp_path / "one") == [b"good", b"x", b"fine"]
    zero = dict.fromkeys(preparing.COUNTS, 0)
    first = {"read": 6, "documents": 2, "tokens": 5, "bytes": 5, "empty": 1, "bad_utf8": 1, "over_long": 1, "duplicates": 1}
    second = {**zero, "read": 2, "documents": 1, "tokens": 4, "bytes": 4, "duplicates": 1}
    assert [{name: file[name] for name in preparing.COUNTS} for file in one.manifest["files"]] == [first, second]
    assert one.manifest["totals"] == {name: first[name] + second[name] for name in preparing.COUNTS}
    two = made(tmp_path, "*.txt", **common, bad_utf8="replace", over_long="split", out=str(tmp_path / "two"))
    split = [b"bad \xef\xbf\xbd o", b"ne", b"much too ", b"long"]
    assert documents(tmp_path / "two") == [b"good", *split[:2], b"good", *split[2:], b"x", b"good", b"fine"]
    totals = two.manifest["totals"]
    assert (totals["read"], totals["documents"], totals["over_long"], totals["bad_utf8"], totals["empty"]) == (8, 9, 2, 1, 1)
    assert totals["tokens"] == totals["bytes"] == sum(map(len, documents(tmp_path / "two")))
    said = summary(two)
    assert "1 bad_utf8: kept, with U+FFFD in place" in said
    assert "2 over_long: made into several" in said
    assert f"{tmp_path / 'a.txt'}: 1 empty, 1 bad_utf8, 2 over_long" in said
    assert "b.txt" not in said


def test_files_without_a_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="without a single token"):
        made(tmp_path, "a.txt")
    assert not list(tmp_path.glob("out.*x"))


KILLED = """
import os, signal, sys
from framework.config.schema import Data, Prepare
from framework.data import journal, preparing
preparing.BATCH_BYTES = 10_000
commit, folder, at, early = journal.Journal.commit, sys.argv[1], int(sys.argv[2]), sys.argv[3] == "early"
def die(self, source, taken):
    if self.parts == at and early:
        for handle in self._files:
            handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self, source, taken)
    if self.parts == at + 1:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.commit = die
data = Data(kind="text", files=(f"{folder}/a.jsonl", f"{folder}/b.jsonl"), tokenizer="bytes")
preparing.prepare(data, Prepare(out=f"{folder}/out", part_mib=0.05, dedup=True), 2, lambda progress: None)
"""


def killed(folder: Path, at: int, when: str) -> None:
    started = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(at), when], cwd=ROOT)
    workers: list[psutil.Process] = []
    while started.poll() is None:
        workers = psutil.Process(started.pid).children() or workers
        time.sleep(0.01)
    assert started.returncode == -signal.SIGKILL
    psutil.wait_procs(workers, timeout=5)
    assert not [worker for worker in workers if worker.is_running()]


@pytest.fixture
def reference(tmp_path: Path) -> dict[str, bytes]:
    """Two files with doubles between them, and what they become without a kill."""
    write_lines(tmp_path / "a.jsonl", TOPICS)
    write_lines(tmp_path / "b.jsonl", [text + "!" for text in TOPICS] + TOPICS[:20])
    made(tmp_path, "a.jsonl", "b.jsonl", dedup=True)
    found = contents(tmp_path)
    for name in found:
        (tmp_path / name).unlink()
    return found


@pytest.mark.parametrize(("at", "when"), [(2, "early"), (12, "late")])
def test_a_kill_costs_one_part_and_changes_nothing(tmp_path: Path, reference: dict[str, bytes], at: int, when: str) -> None:
    killed(tmp_path, at, when)
    assert not list(tmp_path.glob("out.*x"))
    lines = (tmp_path / "out.partial/journal.jsonl").read_text().splitlines()
    assert len(lines) == at + (when == "late")
    kept = json.loads(lines[-1])["ends"][0]
    if when == "early":
        assert (tmp_path / "out.partial/tokens.bin").stat().st_size > kept
    heard: list[int] = []
    data = Data(kind="text", files=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")), tokenizer="bytes")
    prepare(data, Prepare(out=str(tmp_path / "out"), dedup=True), 1, lambda progress: heard.append(progress.nbytes))
    assert contents(tmp_path) == reference
    everything = json.loads(reference["out.json"])["totals"]["bytes"]
    doubles = sum(len(text.encode()) for text in TOPICS[:20])
    assert heard[-1] == everything + doubles - kept // 2, "what lay there was encoded again"


def test_damaged_parts_are_made_again(tmp_path: Path, reference: dict[str, bytes]) -> None:
    """A bit that fell over in the second part: the first is kept, the others are not. A torn last line is no part."""
    killed(tmp_path, 4, "late")
    folder = tmp_path / "out.partial"
    lines = (folder / "journal.jsonl").read_text().splitlines()
    with open(folder / "tokens.bin", "r+b") as file:
        at = json.loads(lines[0])["ends"][0]
        file.seek(at)
        one = file.read(1)
        file.seek(at)
        file.write(bytes([one[0] ^ 1]))
    with open(folder / "journal.jsonl", "a") as file:
        file.write(lines[-1][:40])
    from framework.data.journal import Journal

    journal = Journal.open(folder)
    assert journal.parts == 1
    journal.close()
    made(tmp_path, "a.jsonl", "b.jsonl", dedup=True)
    assert contents(tmp_path) == reference


@pytest.mark.usefixtures("small_batches")
def test_work_of_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", TOPICS)
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b'{"text": "\xe9"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        made(tmp_path, "a.jsonl", part_mib=0.05)
    assert len((tmp_path / "out.partial/journal.jsonl").read_text().splitlines()) > 2
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, "a.jsonl", max_tokens=5)
    assert caught.value.subject == "prepare.out"
    assert "prepare.max_tokens was another" in str(caught.value.got)
    # What has to be changed after the refusal may be changed.
    assert made(tmp_path, "a.jsonl", bad_utf8="replace").manifest["totals"]["bad_utf8"] == 1
    assert documents(tmp_path / "out") == [*(text.encode() for text in TOPICS), "\ufffd".encode()]
    assert made(tmp_path, "a.jsonl", bad_utf8="replace").again
    with pytest.raises(ConfigError, match="made of something else"):
        made(tmp_path, "a.jsonl", bad_utf8="skip")
    os.utime(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="made of something else"):
        made(tmp_path, "a.jsonl", bad_utf8="replace")


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(preparing, "LOCK_S", 0.1)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "out.partial").mkdir()
    with FileLock(tmp_path / "out.partial/lock"), pytest.raises(StartError):
        made(tmp_path, "a.txt")
    made(tmp_path, "a.txt")


def test_a_lost_worker_is_a_letter_and_the_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "LOOK_S", 0.1)
    (tmp_path / "a.txt").write_text("x")
    work = Work(ByteTokenizer(), find_sources([str(tmp_path / "a.txt")]), Prepare(), np.dtype("<u2"))
    monkeypatch.setattr(Work, "encode", lambda self, records: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="code -9"), Pool(work, 2) as pool:
        list(pool.encode([Batch([], 0, 0, 0)]))
    assert not [process for process in pool._processes if process.is_alive()]


def test_a_run_reads_it_and_asks_its_manifest_for_the_vocabulary(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", TOPICS)
    made(tmp_path, "a.jsonl")
    data = Data(kind="tokens", files=(str(tmp_path / "out"),), seq_length=16)
    assert len(open_corpora(data, 256, 1).train) > 1000
    with pytest.raises(ConfigError) as caught:
        open_corpora(data, 255, 1)
    assert (caught.value.subject, caught.value.write) == ("model.vocab_size", "model.vocab_size=256")
    (tmp_path / "out.json").write_text('{"of": "somebody else"}')
    assert read_manifest(tmp_path / "out") is None
    open_corpora(data, 255, 1)
    with pytest.raises(ConfigError, match=r"framework\.prepare"):
        open_corpora(Data(kind="text", files=("a.txt",)), 256, 1)


def test_the_command(tmp_path: Path) -> None:
    """Words in, a token file and a summary out; what is wrong is a letter and exit code 2."""
    write_lines(tmp_path / "a.jsonl", ["one", "", "two"])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "framework.prepare", "data=text", f"data.files=[{tmp_path}/*.jsonl]", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    done = run("data.tokenizer=bytes", f"prepare.out={tmp_path}/out", "prepare.workers=2")
    assert done.returncode == 0, done.stderr
    assert "2 documents, 6 tokens of 6 bytes" in done.stdout
    assert "1 empty: left out" in done.stdout
    assert documents(tmp_path / "out") == [b"one", b"two"]
    for words, subject in {("data.tokenizer=bytes",): "prepare.out", (f"prepare.out={tmp_path}/b",): "data.tokenizer"}.items():
        refused = run(*words)
        assert refused.returncode == 2
        assert refused.stderr.strip().startswith(subject)
        assert "Traceback" not in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.json"]


def test_times_are_for_people() -> None:
    assert [clock(seconds) for seconds in (0.4, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]

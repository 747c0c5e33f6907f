"""Texts to one token file: files found, documents read in order, encoded by many processes, written down as they come.

    OUT.bin, OUT.idx   the token file, in Megatron's layout (tokens.py): one sequence per document
    OUT.json           the manifest: what it was made from and how, counts of every file and in all, checksums
    OUT.partial/       until then: what is done so far (journal.py)

The result depends on the documents, the tokenizer and the settings alone: not on the number of workers, nor on how often the
work was killed and started again. All three files are whole or absent, .idx is the last.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from framework.base.errors import ConfigError, DataError, RunError, StartError
from framework.base.files import fsync_folder, write_json
from framework.config.schema import Data, Prepare
from framework.data.documents import Record, Source, find_sources, opened
from framework.data.encoding import Batch, Encoded, Pool, Work
from framework.data.journal import Journal, Tally
from framework.data.manifest import MADE_BY, manifest_path, read_manifest
from framework.data.remote import bare
from framework.data.tokenizer import Tokenizer, open_tokenizer
from framework.data.tokens import CHUNK_BYTES, dtype_for, write_index

VERSION = 1
"""Of the manifest, and of what documents become: raise it when other tokens would be written."""
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
LOCK_S = 5.0
"""Seconds to wait for the lock: workers of a killed preparation hold it for one more."""
COUNTS = ("read", "documents", "tokens", "bytes", "empty", "bad_utf8", "over_long", "duplicates")
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Progress:
    """`done` of `total` bytes on disk; documents read, and bytes of kept text, since this start."""

    done: int
    total: int
    documents: int
    nbytes: int


@dataclass(frozen=True)
class Prepared:
    """What came of it. `again`: it was done before."""

    manifest: dict[str, Any]
    path: Path
    again: bool = False


def prepare(data: Data, settings: Prepare, workers: int, tell: Callable[[Progress], None]) -> Prepared:
    """Make the token file `settings.out` of `data.files`; `tell` hears how it goes.

    Raises ConfigError, DataError (a file, a document), StartError (another process is at it), RunError (a lost worker, a full disk).
    """
    if not settings.out:
        raise ConfigError("prepare.out", "nothing", "the path of the token file to make, without .bin or .idx", "prepare.out=PATH")
    if not data.files:
        raise ConfigError("data.files", "nothing", "files, globs or URLs of .txt, .jsonl or .parquet", "data.files=[PATH]")
    sources = find_sources(data.files)
    tokenizer = open_tokenizer(data.tokenizer, settings.end_of_document)
    job, out = _job(sources, tokenizer, settings), Path(settings.out)
    done = _done(out, job)
    if done is not None:
        return Prepared(done, out, again=True)
    folder = Path(f"{out}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=LOCK_S):
            _agree(folder, job)
            manifest = _Making(Work(tokenizer, sources, settings, dtype_for(tokenizer.vocab_size)), out, folder, tell).run(workers, job)
    except Timeout:
        raise StartError("prepare.out", f"{out}, which another process is making", "one process at a time", "prepare.out=ANOTHER") from None
    except OSError as error:
        raise RunError(str(out), error.strerror or str(error), "a folder with room to write", "the same command again, to go on") from None
    shutil.rmtree(folder, ignore_errors=True)
    return Prepared(manifest, out)


def _job(sources: Sequence[Source], tokenizer: Tokenizer, settings: Prepare) -> dict[str, Any]:
    """All that decides the result. Kept beside unfinished work: what differs must not go on with it."""
    kept = {name: value for name, value in asdict(settings).items() if name not in ("out", "workers", "part_mib")}
    return {
        "version": VERSION,
        "sources": [[bare(source.path), source.size, source.changed] for source in sources],
        "tokenizer": [tokenizer.kind, tokenizer.checksum, tokenizer.end],
        "settings": kept,
    }


def _done(out: Path, job: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished token file that was made by the same job. Raises ConfigError where another thing has the name."""
    if not Path(f"{out}.idx").exists():
        return None
    manifest = read_manifest(out)
    if manifest is not None and manifest.get("job") == _checksum(job):
        return manifest
    got = f"{out}.idx, which exists and was made of something else"
    raise ConfigError("prepare.out", got, "a free name", "prepare.out=ANOTHER, or remove the file")


def _agree(folder: Path, job: dict[str, Any]) -> None:
    """Raise ConfigError if the unfinished work in `folder` is of another job; write down the job if there is none."""
    place = folder / "job.json"
    try:
        kept = json.loads(place.read_text())
    except (OSError, ValueError):
        kept = None
    if kept is None:
        for file in folder.glob("*.*"):
            file.unlink()  # a start that was killed before it had written down what it does
    elif differ := _differences(kept, job):
        got = f"{folder}, unfinished work where {', '.join(differ)} was another"
        raise ConfigError("prepare.out", got, "the same settings and files, to go on", f"prepare.out=ANOTHER, or remove {folder}")
    write_json(place, job)


def _differences(kept: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Names of what is not as it was and would change the result."""
    before, now = kept["settings"], job["settings"]
    changed = [f"prepare.{name}" for name in now if before.get(name) != now[name]]
    if before.get("bad_utf8") == "refuse" and "prepare.bad_utf8" in changed:
        changed.remove("prepare.bad_utf8")  # what was done so far had nothing to refuse
    names = {"version": "the framework's version", "sources": "a file", "tokenizer": "data.tokenizer"}
    return changed + [name for part, name in names.items() if kept[part] != job[part]]


class _Making:
    """One start of a preparation."""

    def __init__(self, work: Work, out: Path, folder: Path, tell: Callable[[Progress], None]) -> None:
        self.work, self.out, self.folder, self.tell = work, out, folder, tell
        self.journal = Journal.open(folder)
        self.seen = self.journal.seen() if work.settings.dedup else set()
        self.documents, self.nbytes = 0, 0

    def run(self, workers: int, job: dict[str, Any]) -> dict[str, Any]:
        """The manifest, once all files have their names."""
        total = sum(source.size for source in self.work.sources)
        part_bytes, since = self.work.settings.part_mib * MEBIBYTE, 0
        batches = read(self.work, self.journal.source, self.journal.taken)
        with Pool(self.work, workers) as pool:
            for batch, encoded in pool.encode(batches):
                self._write(encoded)
                since += sum(len(record.raw) for record in batch.records)
                if since >= part_bytes:
                    self.journal.commit(batch.source, batch.taken)
                    since = 0
                self.tell(Progress(batch.done, total, self.documents, self.nbytes))
        self.journal.commit(len(self.work.sources), 0)
        self.journal.close()
        return self._finish(job)

    def _write(self, encoded: Encoded) -> None:
        """Append a batch without the documents that were there before, and count it."""
        lengths: list[int] = []
        digests: list[bytes] = []
        kept: list[np.ndarray] = []
        start = 0
        for document in encoded.documents:
            count = sum(document.lengths)
            tokens, start = encoded.tokens[start : start + count], start + count
            double = bool(document.digest) and document.digest in self.seen
            tally: Tally = Counter({"read": 1, **dict.fromkeys(document.faults, 1)})
            if double:
                tally["duplicates"] += 1
            elif document.lengths:
                kept.append(tokens)
                lengths += document.lengths
                tally.update({"documents": len(document.lengths), "tokens": count, "bytes": document.nbytes})
                if document.digest:
                    self.seen.add(document.digest)
                    digests.append(document.digest)
            self.journal.count(document.source, tally)
            self.documents, self.nbytes = self.documents + 1, self.nbytes + document.nbytes
        if kept:
            self.journal.add(np.concatenate(kept), lengths, digests)

    def _finish(self, job: dict[str, Any]) -> dict[str, Any]:
        lengths, work = self.journal.lengths(), self.work
        if not len(lengths):
            raise DataError("data.files", "files without a single token", "at least one document with a token")
        index = self.folder / "index.idx"
        with open(index, "wb") as file:
            write_index(file, lengths, work.dtype)
            file.flush()
            os.fsync(file.fileno())
        manifest = self._manifest(job, _file_checksum(index))
        os.replace(self.folder / "tokens.bin", f"{self.out}.bin")
        write_json(manifest_path(self.out), manifest)
        os.replace(index, f"{self.out}.idx")
        fsync_folder(self.out.parent)
        return manifest

    def _manifest(self, job: dict[str, Any], index_checksum: str) -> dict[str, Any]:
        tallies, tokenizer = self.journal.tallies, self.work.tokenizer
        files = [
            {"path": bare(source.path), "size": source.size, **_counts(tallies.get(number, Counter()))}
            for number, source in enumerate(self.work.sources)
        ]
        return {
            "version": VERSION,
            "made_by": MADE_BY,
            "tokenizer": {
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
                "end_of_document": tokenizer.end,
                "xxh3_128": tokenizer.checksum,
            },
            "settings": job["settings"],
            "dtype": self.work.dtype.name,
            "totals": _counts(sum(tallies.values(), Counter())),
            "files": files,
            "xxh3_128": {"bin": self.journal.digest.hexdigest(), "idx": index_checksum},
            "job": _checksum(job),
        }


def read(work: Work, first: int = 0, taken: int = 0) -> Iterator[Batch]:
    """All documents in order, in batches of about BATCH_BYTES; from source number `first` on, without its first `taken` documents."""
    records: list[Record] = []
    nbytes, passed = 0, sum(source.size for source in work.sources[:first])
    separator = (work.settings.separator or "").replace("\\n", "\n").replace("\\t", "\t").encode() or None
    for number in range(first, len(work.sources)):
        source, place = work.sources[number], 0
        with opened(source) as reading:
            for place, (at, raw) in enumerate(reading.pieces(separator, work.settings.field), start=1):
                if number == first and place <= taken:
                    continue
                records.append(Record(number, at, raw))
                nbytes += len(raw)
                if nbytes >= BATCH_BYTES or len(records) >= BATCH_DOCUMENTS:
                    yield Batch(records, number, place, passed + reading.done)
                    records, nbytes = [], 0
        passed += source.size
    if records:
        yield Batch(records, len(work.sources), 0, passed)


def _counts(tally: Tally) -> dict[str, int]:
    return {name: tally[name] for name in COUNTS}


def _checksum(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _file_checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

"""Batches of documents to token ids, by many processes, in the order in which they came.

What a batch becomes depends on the batch alone, so the number of processes changes nothing but the time. Worker processes
are forks: they inherit the open tokenizer, read no file and write none. They end with the process that started them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from framework.base.errors import DataError, FrameworkError, RunError
from framework.config.schema import Prepare
from framework.data.documents import Record, Source, Text, text_of
from framework.data.tokenizer import Tokenizer

AHEAD = 3
"""Batches under way per worker."""
LOOK_S = 1.0
"""Seconds between two looks at who is still alive."""


@dataclass(frozen=True)
class Batch:
    """Documents that are encoded together, and how far the reader has come behind them: `taken` documents of source number
    `source`, `done` bytes on disk of all sources."""

    records: Sequence[Record]
    source: int
    taken: int
    done: int


class Document(NamedTuple):
    """What became of a document. `lengths` in tokens of each piece that it was made into, the end of document counted; empty if it
    was left out. `nbytes` of the kept text. `faults`: empty, bad_utf8, over_long. `digest` of the text where doubles are looked for."""

    source: int
    lengths: tuple[int, ...]
    nbytes: int
    faults: tuple[str, ...] = ()
    digest: bytes = b""


class Encoded(NamedTuple):
    """The documents of a batch, and the ids of those that are kept, one after the other: int [tokens] in the file's dtype."""

    documents: list[Document]
    tokens: np.ndarray


@dataclass(frozen=True)
class Work:
    """What is done to a batch."""

    tokenizer: Tokenizer
    sources: Sequence[Source]
    settings: Prepare
    dtype: np.dtype

    def encode(self, records: Sequence[Record]) -> Encoded:
        """Raises DataError for bytes that are not UTF-8 where bad_utf8=refuse, and for what is no document at all."""
        texts = [self._text(record) for record in records]
        wanted = [at for at, text in enumerate(texts) if text.text and not (text.spoilt and self.settings.bad_utf8 == "skip")]
        ids = dict(zip(wanted, self.tokenizer.encode([texts[at].text for at in wanted]), strict=True)) if wanted else {}
        documents, kept = [], []
        for at, (record, text) in enumerate(zip(records, texts, strict=True)):
            document, tokens = self._document(record, text, ids.get(at))
            documents.append(document)
            kept += tokens
        return Encoded(documents, np.concatenate(kept).astype(self.dtype) if kept else np.empty(0, self.dtype))

    def _text(self, record: Record) -> Text:
        source = self.sources[record.source]
        text = text_of(record, source, self.settings.field)
        if text.spoilt and self.settings.bad_utf8 == "refuse":
            write = "prepare.bad_utf8=replace (by U+FFFD), or prepare.bad_utf8=skip (such documents)"
            raise DataError(source.path, f"at {text.spoilt} what is not UTF-8", "UTF-8", write)
        return text

    def _document(self, record: Record, text: Text, ids: np.ndarray | None) -> tuple[Document, list[np.ndarray]]:
        """The document's record, and its ids; none if it is left out."""
        faults = ("bad_utf8",) if text.spoilt else ()
        if ids is None or not len(ids):
            return Document(record.source, (), 0, faults or ("empty",)), []
        limit = self.settings.max_tokens
        pieces = [ids]
        if limit is not None and len(ids) > limit:
            faults = (*faults, "over_long")
            if self.settings.over_long == "skip":
                return Document(record.source, (), 0, faults), []
            pieces = [ids[start : start + limit] for start in range(0, len(ids), limit)]
        if self.tokenizer.end is not None:
            pieces[-1] = np.append(pieces[-1], self.tokenizer.end)
        written = text.text.encode()
        digest = xxhash.xxh3_128_digest(written) if self.settings.dedup else b""
        return Document(record.source, tuple(map(len, pieces)), len(written), faults, digest), pieces


class Pool:
    """Worker processes. Use it in a `with` block: afterwards none is left."""

    def __init__(self, work: Work, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._tasks, self._results = context.Queue(), context.Queue()
        given = (work, self._tasks, self._results, os.getpid())
        self._processes = [context.Process(target=_serve, args=given, daemon=True) for _ in range(workers)]

    def __enter__(self) -> Pool:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # they hold nothing that could be left half-done
        for process in self._processes:
            process.join()
        for each in (self._tasks, self._results):
            each.cancel_join_thread()
            each.close()

    def encode(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch with what it became, in their order. Raises the letter of the first batch that has one; RunError for a lost worker."""
        under_way: dict[int, Batch] = {}
        ready: dict[int, Encoded | FrameworkError] = {}
        following = 0
        for number, batch in enumerate(batches):
            under_way[number] = batch
            self._tasks.put((number, batch.records))
            while len(under_way) >= AHEAD * len(self._processes):
                yield under_way.pop(following), self._take(following, ready)
                following += 1
        while under_way:
            yield under_way.pop(following), self._take(following, ready)
            following += 1

    def _take(self, number: int, ready: dict[int, Encoded | FrameworkError]) -> Encoded:
        while number not in ready:
            try:
                at, result = self._results.get(timeout=LOOK_S)
                ready[at] = result
            except queue.Empty:
                lost = [process for process in self._processes if not process.is_alive()]
                if lost:
                    got = f"one that ended with code {lost[0].exitcode}"
                    raise RunError("a worker process", got, "all alive to the end", "the same command again, to go on") from None
        result = ready.pop(number)
        if isinstance(result, FrameworkError):
            raise result
        return result


def _serve(work: Work, tasks: Any, results: Any, parent: int) -> None:
    """A worker's life: batch in, ids out. Signals from a terminal are the parent's to judge."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while os.getppid() == parent:
        try:
            number, records = tasks.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        try:
            result: Encoded | FrameworkError = work.encode(records)
        except FrameworkError as letter:
            result = letter
        results.put((number, result))
    os._exit(0)  # the parent has gone, and with it who would read the rest

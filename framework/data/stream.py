"""Batches of one rank, in order and without end: loader processes read ahead, and copies to a device run beside the computation.

Reads a Corpus through torch's DataLoader; writes nothing. It keeps no position: the caller says how many samples are consumed,
and the rest follows from order.py. The random numbers of torch, numpy and Python are never touched.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from framework.base.errors import EXIT_FAULT, DataError, FrameworkError, RunError
from framework.data.order import share
from framework.data.pack import IGNORE, MicroBatch, Rows, micro_batch, rows_of
from framework.data.tokens import Corpus

log = logging.getLogger(__name__)

MAX_WORKERS = 8
ORDERED_AHEAD = 1024
BEGIN_S, STARTS = 20.0, 3
"""Seconds in which a loader process must have begun, and how often they are started."""
Tensors = tuple[Tensor, ...]
"""Rows, as tensors."""
PR_SET_PDEATHSIG = 1  # of Linux's prctl(2): the signal that a process gets when its parent ends


def default_workers(cores: int, ranks: int) -> int:
    """Loader processes of each of `ranks` ranks on a host with `cores` cores: at least one, at most eight."""
    return min(MAX_WORKERS, max(1, cores // ranks))


@dataclass(frozen=True)
class StreamSettings:
    """What a stream needs to know. Sizes are in samples; `prefetch` is micro-batches that each loader process reads ahead."""

    seed: int
    shuffle: bool
    micro_size: int
    accumulation: int
    data_rank: int
    data_size: int
    workers: int
    prefetch: int
    vocab_size: int
    context_rank: int = 0
    context_size: int = 1


class TrainingStream:
    """The optimizer steps of one rank as lists of micro-batches.

    `wait_s`: seconds that the last step waited for its data. Raises, while it is read, DataError (a token that the model does
    not know) and RunError (a loader process that died).
    """

    def __init__(self, corpus: Corpus, settings: StreamSettings, device: torch.device) -> None:
        self._corpus, self._settings, self._device = corpus, settings, device
        self._reader: _Reader | None = None
        self.wait_s = 0.0

    def start(self, consumed: int) -> Iterator[list[MicroBatch]]:
        """Endless steps of `accumulation` micro-batches each, from global sample `consumed` on. Ends the steps of an earlier start."""
        self.close()
        self._reader = _Reader(_Source(self._corpus, self._settings, consumed), self._settings)
        return self._steps(self._reader, consumed)

    def close(self) -> None:
        """End the loader processes. The stream can be started again."""
        if self._reader is not None:
            self._reader.close()

    def _steps(self, reader: _Reader, consumed: int) -> Iterator[list[MicroBatch]]:
        settings = self._settings
        steps = reader.steps(settings.accumulation)
        if self._device.type != "cpu":
            steps = _copied_ahead(steps, self._device)
        try:
            for step, micros in enumerate(steps):
                self.wait_s, reader.waited_s = reader.waited_s, 0.0
                numbers = itertools.count(step * settings.accumulation)
                yield [micro_batch(rows, _indices(settings, consumed, micro)) for rows, micro in zip(micros, numbers, strict=False)]
        finally:
            reader.close()


def validation_batches(corpus: Corpus, settings: StreamSettings, samples: int, device: torch.device) -> Iterator[MicroBatch]:
    """Samples 0..samples-1 of a held-out corpus (0: all) in the file's order, divided over the data ranks.

    Every rank gets the same number of micro-batches of the same shape, because collectives are inside the forward pass: rows
    past the end repeat sample 0 with every target IGNORE. Read in this process; draws no random number.
    """
    count = min(samples or len(corpus), len(corpus))
    for micro in range(math.ceil(count / (settings.micro_size * settings.data_size))):
        indices = _indices(settings, 0, micro)
        past_end = indices >= count
        places = np.where(past_end, 0, indices)
        rows = _read(corpus, places, settings)
        batch = micro_batch([torch.from_numpy(array).to(device) for array in rows], indices)
        batch.targets[torch.from_numpy(past_end).to(device)] = IGNORE
        yield batch


def _indices(settings: StreamSettings, consumed: int, micro: int) -> np.ndarray:
    return share(consumed, micro, settings.micro_size, settings.data_rank, settings.data_size)


def _read(corpus: Corpus, places: np.ndarray, settings: StreamSettings) -> Rows:
    """What this rank has of the samples at `places`. Raises DataError for a token that the model does not know."""
    tokens = corpus.read(places)
    _check_ids(tokens, places, corpus, settings.vocab_size)  # of the whole rows: so context ranks say the same
    return rows_of(tokens, corpus.read_starts(places) if corpus.apart else None, settings.context_rank, settings.context_size)


def _check_ids(tokens: np.ndarray, places: np.ndarray, corpus: Corpus, vocab_size: int) -> None:
    """DataError that names the first token [n, seq + 1] outside the vocabulary, if there is one."""
    if tokens.min() >= 0 and tokens.max() < vocab_size:
        return
    row, column = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]
    raise DataError(
        corpus.file_of(int(places[row])).bin_path,
        f"token id {tokens[row, column]} in sample {places[row]} of the corpus",
        f"ids from 0 to {vocab_size - 1} (model.vocab_size is {vocab_size})",
        "model.vocab_size of the tokenizer that made the file, or a file made with the model's tokenizer",
    )


class _Source(Dataset[Rows | DataError]):
    """Micro-batch by number: a pure function, so that any process may read any number."""

    def __init__(self, corpus: Corpus, settings: StreamSettings, consumed: int) -> None:
        self._corpus, self._settings, self._consumed = corpus, settings, consumed
        self._block_size = max(1, ORDERED_AHEAD // settings.micro_size)
        self._block, self._block_places = -1, np.empty((0, settings.micro_size), np.int64)

    def __getitem__(self, micro: int) -> Rows | DataError:
        """The micro-batch's rows, or the letter that says why not: in a worker, torch would wrap it in a traceback."""
        try:
            return _read(self._corpus, self._places(micro), self._settings)
        except DataError as letter:
            return letter

    def _places(self, micro: int) -> np.ndarray:
        """Positions [micro] of the samples. Made for a block of micro-batches at once: a call costs as much for 8 samples as for 1,000."""
        block, row = divmod(micro, self._block_size)
        if block != self._block:
            numbers = range(block * self._block_size, (block + 1) * self._block_size)
            indices = np.concatenate([_indices(self._settings, self._consumed, number) for number in numbers])
            places = self._corpus.places(indices, self._settings.seed, self._settings.shuffle)
            self._block, self._block_places = block, places.reshape(len(numbers), -1)
        return self._block_places[row]


class _Numbers(Sampler[int]):
    """0, 1, 2, ... without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class _Reader:
    """Micro-batches 0, 1, 2, ... of a source, read by loader processes (or by this one when workers is 0)."""

    def __init__(self, source: _Source, settings: StreamSettings) -> None:
        self._loader = _begin(source, settings)
        self._workers = settings.workers
        self.waited_s = 0.0
        # Workers ignore SIGTERM, so an exit without close() would wait for them without end.
        atexit.register(self.close)

    def steps(self, accumulation: int) -> Iterator[list[Tensors]]:
        """Lists of the rows of `accumulation` micro-batches, without end."""
        while True:
            yield [self._next() for _ in range(accumulation)]

    def close(self) -> None:
        if self._workers:
            # Private, and the only way that does not depend on when the iterator is collected: a traceback can hold it.
            self._loader._shutdown_workers()  # type: ignore[attr-defined]
            self._workers = 0
        atexit.unregister(self.close)

    def _next(self) -> Tensors:
        started = time.perf_counter()
        try:
            item = next(self._loader)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            item = RunError("a data loader process", str(error), "one that lives as long as the run", "data.workers=0 to read without it")
        self.waited_s += time.perf_counter() - started
        if isinstance(item, FrameworkError):
            raise item
        return tuple(torch.from_numpy(array) for array in item)


def _begin(source: _Source, settings: StreamSettings) -> Any:
    """An iterator whose loader processes have all begun. Raises RunError where they do not.

    They are forked: so they start in milliseconds and share the maps, and they use numpy only. But a fork of a process with threads
    can stop before its first line, on a lock that a thread held at that moment (seen once in a thousand starts): a
    set of which one does not begin is killed, and another one made.
    """
    for _ in range(STARTS):
        told, tell = os.pipe()
        loader = DataLoader(
            source,
            batch_size=None,  # the source makes whole micro-batches itself
            sampler=_Numbers(),
            collate_fn=_unchanged,  # type: ignore[arg-type]
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch if settings.workers else None,
            worker_init_fn=partial(_become_worker, os.getpid(), tell) if settings.workers else None,
            multiprocessing_context="fork" if settings.workers else None,
            generator=torch.Generator(),  # without one, DataLoader draws a seed from torch's global random numbers
        )
        with _handler_kept(signal.SIGCHLD):
            iterator: Any = iter(loader)
        begun = _count(told, settings.workers, BEGIN_S)
        os.close(told)
        os.close(tell)
        if begun == settings.workers:
            return iterator
        log.warning("%d of %d loader processes have not begun within %.0f s: all anew", settings.workers - begun, settings.workers, BEGIN_S)
        for process in iterator._workers:
            process.kill()
        iterator._shutdown_workers()
    raise RunError("data loader processes", f"none that begins within {BEGIN_S:.0f} s, {STARTS} times", "all of them", "data.workers=0")


def _count(told: int, wanted: int, seconds: float) -> int:
    """Bytes that come out of a pipe until they are as many as wanted, or the time is over."""
    until, found = time.monotonic() + seconds, 0
    while found < wanted and select.select([told], [], [], max(0.0, until - time.monotonic()))[0]:
        found += len(os.read(told, wanted - found))
    return found


def _unchanged(item: Rows | DataError) -> Rows | DataError:
    """Arrays go through the workers' pipe as they are: as tensors each would cost a shared-memory file, four times the time."""
    return item


def _become_worker(trainer: int, tell: int, worker: int) -> None:
    """Runs first in each loader process, which says so to the pipe `tell`: it lives as long as the process `trainer`, and no signal
    but that one's end stops it.

    The trainer decides when a signal ends the run, and closes its workers then.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:
        os._exit(EXIT_FAULT)  # it died before the line above; torch's own watch would take the new parent for it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.write(tell, b".")


@contextmanager
def _handler_kept(number: signal.Signals) -> Iterator[None]:
    """Undo a change to a signal's handler.

    DataLoader's handler for SIGCHLD raises in the middle of whatever the main thread does; without it, a dead worker is found
    where its batch is missed, within five seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers belong to the main thread, and DataLoader leaves them alone elsewhere
        return
    before = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, before)


def _copied_ahead(steps: Iterator[list[Tensors]], device: torch.device) -> Iterator[list[Tensors]]:
    """The same steps on an accelerator: while step n is computed, n + 1 is copied, pinned, on a stream of its own."""
    from deepspeed.accelerator import get_accelerator  # takes seconds to import, and a CPU needs nothing of it

    accelerator: Any = get_accelerator()  # its streams are None on a CPU, which does not come here
    side = accelerator.Stream(device)

    def copy(micros: list[Tensors]) -> list[Tensors]:
        with accelerator.stream(side):
            return [tuple(one.pin_memory().to(device, non_blocking=True) for one in rows) for rows in micros]

    ready = copy(next(steps))
    for following in steps:
        current = accelerator.current_stream(device)
        current.wait_stream(side)
        for one in itertools.chain.from_iterable(ready):
            one.record_stream(current)  # the allocator must not hand the memory to `side` again before the computation is through
        coming = copy(following)
        yield ready
        ready = coming

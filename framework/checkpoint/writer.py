"""Writing a checkpoint: the two steps of it, and a process that does them beside the training. No torch in here.

`write_part` writes the files of one rank; `commit` waits for the parts of all ranks and writes the manifest. A synchronous
save calls them in the training process, an asynchronous one in a `Writer`'s process: the code is the same. No collectives:
ranks meet in the folder.

The process (`python -m framework.checkpoint.writer FD`) takes jobs as JSON lines on stdin and answers each with a line on
stdout. It finishes what it has begun when the trainer is gone, and is deaf to the signals that end a trainer.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from framework.base.errors import FrameworkError, RunError
from framework.base.units import bytes_text, seconds_text
from framework.checkpoint.folders import Attempt, open_attempt
from framework.checkpoint.manifest import MANIFEST, File, FilePlan, Manifest, encode_header, join, part, weights_name

CHUNK = 1 << 20
"""Bytes hashed and written at a time; they stay in the processor's cache between the two."""
ORPHAN_WAIT_S = 5.0
"""How long an orphaned writer waits for a rank of which there is no sign."""
Source = Callable[[FilePlan], Iterable[memoryview]]
"""Gives the data of a file, piece by piece, in order."""


@dataclass(frozen=True)
class Job:
    """What one rank has to do for one checkpoint; plain data.

    `root` is an absolute folder or a URL. `attempt` is the same on all ranks and never used twice. `linked` names a complete
    checkpoint folder in `root` whose file of untrained parameters is taken over. Rank 0 commits. `timeout_s`: how long it waits for the other
    ranks' parts. `delay_s` (for tests) is slept after each written chunk.
    """

    root: str
    step: int
    attempt: str
    rank: int
    ranks: int
    files: tuple[FilePlan, ...]
    small: dict[str, Any] = field(default_factory=dict)
    local: dict[str, Any] = field(default_factory=dict)
    linked: str = ""
    timeout_s: float = 600.0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """How a job ended. `nbytes` written by this rank; `write_s` without the wait for other ranks; `error` is a letter, or empty."""

    step: int
    rank: int
    nbytes: int = 0
    write_s: float = 0.0
    error: str = ""


def write_part(job: Job, source: Source) -> Result:
    """Write this rank's files and its part of the manifest.

    Raises RunError where the disk refuses; what was written is then removed.
    """
    begun = time.monotonic()
    attempt = open_attempt(job.root, job.step, job.attempt)
    names = [plan.name for plan in job.files]
    try:
        attempt.begin(job.rank)
        files = [_write_file(attempt, plan, source(plan), job.delay_s) for plan in job.files]
        nbytes = sum(file.size for file in files)
        if job.linked:
            files.append(_take_over(attempt, job))
        attempt.put(_part_name(job.rank), part(files, job.attempt, job.local))
        if job.rank != 0:  # rank 0 stays visible until it has committed
            attempt.end(job.rank)
    except OSError as error:
        _give_up(attempt, job, names, error)
        raise RunError(f"checkpoint of step {job.step} in {job.root}", f"rank {job.rank}: {error.strerror or error}",
                       f"room for {bytes_text(sum(plan.nbytes for plan in job.files))} and the right to write") from error  # fmt: skip
    return Result(job.step, job.rank, nbytes, time.monotonic() - begun)


def commit(job: Job, is_orphan: Callable[[], bool] = lambda: False) -> None:
    """Wait for the parts of all ranks, then write the manifest and publish.

    `is_orphan` says whether the trainer is gone: then ranks of which there is no sign are not waited for.
    Raises RunError if a part does not come in time, a rank failed, or the disk refuses.
    """
    attempt = open_attempt(job.root, job.step, job.attempt)
    try:
        parts = _gather(attempt, job, is_orphan)
        for rank in range(job.ranks):
            attempt.remove(_part_name(rank))
        attempt.end(job.rank)
        attempt.publish(join(parts, job.step, job.small))
    except OSError as error:
        attempt.end(job.rank)
        raise RunError(f"checkpoint of step {job.step} in {job.root}", error.strerror or error, "a folder that can be written") from error
    except RunError:
        attempt.end(job.rank)
        raise


def _gather(attempt: Attempt, job: Job, is_orphan: Callable[[], bool]) -> list[dict[str, Any]]:
    parts: dict[int, dict[str, Any]] = {}
    begun = signed = time.monotonic()
    while len(parts) < job.ranks:
        for rank in set(range(job.ranks)) - parts.keys():
            if (content := attempt.get(_part_name(rank))) is not None:
                parts[rank] = json.loads(content)
                if parts[rank]["attempt"] != job.attempt or "error" in parts[rank]:
                    raise RunError(f"checkpoint of step {job.step} in {job.root}", f"rank {rank}: {parts[rank].get('error', 'another attempt')}")
        missing = sorted(set(range(job.ranks)) - parts.keys())
        now = time.monotonic()
        if not is_orphan() or attempt.working(missing):
            signed = now
        if missing and (now - begun > job.timeout_s or now - signed > ORPHAN_WAIT_S):
            raise RunError(f"checkpoint of step {job.step} in {job.root}", f"no part of ranks {missing} after {seconds_text(now - begun)}",
                           "a part of every rank")  # fmt: skip
        if missing:
            time.sleep(0.02)
    return [parts[rank] for rank in range(job.ranks)]


def _write_file(attempt: Attempt, plan: FilePlan, data: Iterable[memoryview], delay_s: float) -> File:
    header, digest, written = encode_header(plan.header), xxhash.xxh3_128(), 0
    file = attempt.create(plan.name)
    try:
        for chunk in _chunks(header, data):
            digest.update(chunk)
            _write_all(file, chunk)
            written += len(chunk)
            if delay_s:
                time.sleep(delay_s)
    except BaseException:
        file.close()
        raise
    attempt.close(file)
    assert written == len(header) + plan.nbytes, f"{plan.name}: {written} bytes where {len(header) + plan.nbytes} were planned"
    return File(plan.name, written, digest.hexdigest(), len(header), plan.shards, plan.shapes)


def _chunks(header: bytes, data: Iterable[memoryview]) -> Iterator[memoryview]:
    yield memoryview(header)
    for piece in data:
        for at in range(0, len(piece), CHUNK):
            yield piece[at : at + CHUNK]


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    """A full disk may take a part of a chunk before it says no."""
    while chunk:
        chunk = chunk[file.write(chunk) :]


def _take_over(attempt: Attempt, job: Job) -> File:
    """The untrained parameters of `job.linked`, as a file of this checkpoint too."""
    earlier = open_attempt(job.root, 0, "").get(f"../{job.linked}/{MANIFEST}")
    raise NotImplementedError(earlier)


def _give_up(attempt: Attempt, job: Job, names: list[str], error: OSError) -> None:
    """Free the disk, and tell the rank that waits for us; where the disk refuses that too, its time limit tells it."""
    try:
        for name in names:
            attempt.remove(name)
        attempt.put(_part_name(job.rank), json.dumps({"attempt": job.attempt, "error": error.strerror or str(error)}).encode())
        attempt.end(job.rank)
    except OSError:
        pass


def _part_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"

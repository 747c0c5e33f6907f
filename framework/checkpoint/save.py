"""Writing a checkpoint, in two steps. No torch, no processes.

`write_part` writes the files of one rank; `commit`, on rank 0, waits for the parts of all ranks, writes the manifest and
publishes. A synchronous save calls them in the training process, an asynchronous one in the process of writer.py: the code
is the same. There are no collectives: ranks meet in the folder.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import xxhash

from framework.checkpoint.errors import CheckpointError, SaveError, said
from framework.checkpoint.folders import Attempt, open_attempt
from framework.checkpoint.manifest import File, FilePlan, encode_header, join, weights_name

CHUNK = 1 << 20
"""Bytes hashed and written at a time; they stay in the processor's cache between the two."""
ORPHAN_WAIT_S = 5.0
"""How long an orphaned writer waits for a rank of which there is no sign."""
Source = Callable[[FilePlan], Iterable[memoryview]]
"""Gives the data of a file, piece by piece, in order."""


@dataclass(frozen=True)
class Job:
    """What one rank has to do for one checkpoint; plain data.

    `root` is an absolute folder or a URL. `attempt` is a word that is the same on all ranks and is never used twice.
    `linked`, if given, names a complete checkpoint folder in `root` whose file of untrained parameters becomes part of
    this one. `timeout_s` is how long rank 0 waits for the other ranks' parts. `delay_s`, for tests, is slept after each
    written chunk.
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

    @property
    def subject(self) -> str:
        """What letters about this job are about."""
        return f"checkpoint of step {self.step} in {self.root}"


@dataclass(frozen=True)
class Result:
    """How a job ended: bytes that this rank wrote, seconds without the wait for other ranks (and of those the processor's), and the
    parts of its error, if it met one."""

    step: int
    nbytes: int = 0
    write_s: float = 0.0
    cpu_s: float = 0.0
    error: tuple[Any, ...] = ()


def write_part(job: Job, source: Source) -> Result:
    """Write this rank's files and its part of the manifest.

    Raises SaveError where the disk refuses; what was written is then removed.
    """
    begun, cpu_begun = time.monotonic(), time.process_time()
    attempt = open_attempt(job.root, job.step, job.attempt)
    try:
        attempt.begin(job.rank)
        files = [_write_file(attempt, plan, source(plan), job.delay_s) for plan in job.files]
        nbytes = sum(file.size for file in files)
        if job.linked:
            files.append(attempt.take_over(job.linked, weights_name(job.rank)))
        if job.rank != 0:  # rank 0 stays visible until it has committed; for the others nothing may come after the part
            attempt.end(job.rank)
        part = {"attempt": job.attempt, "files": files, "local": job.local}
        attempt.put(_part_name(job.rank), json.dumps(part, default=vars).encode())
    except attempt.faults as error:
        _give_up(attempt, job, error)
        expected = f"room for {sum(plan.nbytes for plan in job.files)} bytes, and the right to write"
        raise SaveError(job.subject, f"rank {job.rank}: {said(error)}", expected) from error
    return Result(job.step, nbytes, time.monotonic() - begun, time.process_time() - cpu_begun)


def commit(job: Job, is_orphan: Callable[[], bool] = lambda: False) -> None:
    """Wait for the parts of all ranks, write the manifest, publish.

    `is_orphan` says whether the trainer is gone: then ranks of which there is no sign are not waited for.
    Raises SaveError if a part does not come in time, a rank failed, or the disk refuses.
    """
    attempt = open_attempt(job.root, job.step, job.attempt)
    try:
        parts = _gather(attempt, job, is_orphan)
        for rank in range(job.ranks):
            attempt.remove(_part_name(rank))
        attempt.publish(join(parts, job.step, job.small), job.rank)
    except CheckpointError:
        raise
    except attempt.faults as error:
        raise SaveError(job.subject, said(error), "a folder that can be written") from error
    finally:
        with contextlib.suppress(*attempt.faults):  # the failure that brought us here is the one to tell
            attempt.end(job.rank)


def _gather(attempt: Attempt, job: Job, is_orphan: Callable[[], bool]) -> list[dict[str, Any]]:
    """The parts of all ranks, in rank order."""
    parts: dict[int, dict[str, Any]] = {}
    begun = last_sign = time.monotonic()
    while True:
        for rank in set(range(job.ranks)) - parts.keys():
            part = json.loads(attempt.get(_part_name(rank)) or b"{}")
            if part.get("attempt") != job.attempt:
                continue  # not there yet; behind a URL an earlier try may have left its own
            if "error" in part:
                raise SaveError(job.subject, f"rank {rank}: {part['error']}", "a part of every rank")
            parts[rank] = part
        missing = sorted(set(range(job.ranks)) - parts.keys())
        if not missing:
            return [parts[rank] for rank in range(job.ranks)]
        now = time.monotonic()
        if not is_orphan() or attempt.working(missing):
            last_sign = now
        if now - begun > job.timeout_s or now - last_sign > ORPHAN_WAIT_S:
            raise SaveError(job.subject, f"no part of ranks {missing} after {now - begun:.1f} s", "a part of every rank")
        time.sleep(0.02)


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
        attempt.flush(file)
    finally:
        file.close()
    assert written == len(header) + plan.nbytes, f"{plan.name}: {written} bytes where {len(header) + plan.nbytes} were planned"
    return File(plan.name, written, digest.hexdigest(), len(header), plan.shards, plan.shapes)


def _chunks(header: bytes, data: Iterable[memoryview]) -> Iterator[memoryview]:
    yield memoryview(header)
    for piece in data:
        for at in range(0, len(piece), CHUNK):
            yield piece[at : at + CHUNK]


def _write_all(file: BinaryIO, chunk: memoryview) -> None:
    """A disk that is nearly full takes a part of a chunk before it says no."""
    while chunk:
        chunk = chunk[file.write(chunk) :]


def _give_up(attempt: Attempt, job: Job, error: Exception) -> None:
    """Free the disk, and tell the rank that waits for us."""
    with contextlib.suppress(*attempt.faults):  # where the disk refuses this too, rank 0's time limit tells it
        for plan in job.files:
            attempt.remove(plan.name)
        attempt.end(job.rank)
        attempt.put(_part_name(job.rank), json.dumps({"attempt": job.attempt, "error": said(error)}).encode())


def _part_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"

"""The process that writes checkpoints beside the training, one for each rank, and the trainer's handle on it. No torch.

The process (`python -m framework.checkpoint.writer FD PID`) takes jobs as JSON lines on stdin, reads their data from the shared
memory FD, and answers each with a line on stdout. It yields to the training (low CPU and I/O priority), is deaf to the
signals that end a trainer, and when the trainer is gone finishes what it has begun and ends.

The memory is a file without a name, so that nothing is left of it when both processes are killed. It is made before the
accelerator is started, with the process that inherits it, and gets its size later.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.checkpoint.errors import CheckpointError, SaveError
from framework.checkpoint.manifest import FilePlan
from framework.checkpoint.save import CHUNK, Job, Result, commit, write_part

IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call, by machine."""
LOWEST_BEST_EFFORT = 2 << 13 | 7
"""I/O class and level: after everybody else, but never starved as the idle class may be."""


class Writer:
    """A writer process. Make it before anything touches an accelerator, and end it with `close`."""

    def __init__(self) -> None:
        self.memory = os.memfd_create("checkpoint")
        package_root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "framework.checkpoint.writer", str(self.memory), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.memory], cwd=package_root, start_new_session=True,
        )  # fmt: skip
        self.pending: deque[Job] = deque()

    def submit(self, job: Job) -> None:
        """Begin a job whose data lies in the memory already. One at a time: the memory is in use until its result is there."""
        assert not self.pending, "a job was submitted while another one ran"
        self.pending.append(job)
        self._send(json.dumps(job, default=vars).encode())

    @property
    def busy(self) -> bool:
        """Whether a job was submitted whose result has not been taken."""
        return bool(self.pending)

    def poll(self) -> Result | None:
        """The result of the submitted job if it has ended, without waiting. Raises SaveError where the job failed."""
        assert self.process.stdout is not None
        ready = self.busy and select.select([self.process.stdout], [], [], 0)[0]
        return self.wait() if ready else None

    def wait(self) -> Result | None:
        """Wait for the submitted job, if any. Raises SaveError where the job failed."""
        if not self.busy:
            return None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        job = self.pending.popleft()
        if not line.endswith(b"\n"):
            status = self.process.wait()
            raise SaveError(job.subject, f"the writer process ended with status {status}", "a writer that lives as long as its trainer")
        result = Result(**json.loads(line))
        if result.error:
            raise SaveError(*result.error)
        return result

    def close(self) -> Result | None:
        """Wait for the submitted job, if any, and end the process; a second call does nothing. Raises SaveError where the job failed."""
        try:
            return self.wait()
        finally:
            if self.memory >= 0:
                self._send(b"")  # closing the pipe would not do: a forked loader worker may hold it open
                self.process.communicate()
                os.close(self.memory)
                self.memory = -1

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died: poll and wait tell it
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()


def main(memory: int, trainer: int) -> None:
    """Serve jobs until the process `trainer`, our parent, says so or is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    _lower_io_priority()
    for line in _lines(trainer):
        result = _serve(Job(**_with_plans(json.loads(line))), memory, trainer)
        try:
            os.write(1, json.dumps(asdict(result)).encode() + b"\n")
        except BrokenPipeError:
            return  # nobody is left to be told


def _serve(job: Job, memory: int, trainer: int) -> Result:
    try:
        result = write_part(job, lambda plan: _read(memory, plan))
        if job.rank == 0:
            commit(job, lambda: os.getppid() != trainer)
        return result
    except CheckpointError as error:
        return Result(job.step, error=(error.subject, error.got, error.expected, error.write))
    except Exception as error:  # whatever it is, the trainer has to hear of it
        return Result(job.step, error=(job.subject, f"{type(error).__name__}: {error}"))


def _lines(trainer: int) -> Iterator[bytes]:
    """Complete lines from stdin, up to an empty one, its end, or the end of the trainer (whose forked children may keep the pipe open)."""
    rest = b""
    while True:
        ready = select.select([0], [], [], 1.0)[0]
        content = os.read(0, 1 << 16) if ready else None
        if content == b"" or (content is None and os.getppid() != trainer):
            return  # an unfinished line was never submitted
        *lines, rest = (rest + (content or b"")).split(b"\n")
        for line in lines:
            if not line:
                return
            yield line


def _read(memory: int, plan: FilePlan) -> Iterator[memoryview]:
    """The data of a file, a chunk at a time: the copy stays in the cache, and no page tables are built as a mapping would."""
    chunk = memoryview(bytearray(CHUNK))
    at, end = plan.start, plan.start + plan.nbytes
    while at < end:
        count = os.preadv(memory, [chunk[: min(CHUNK, end - at)]], at)
        assert count > 0, "the shared memory is shorter than the job"
        yield chunk[:count]
        at += count


def _with_plans(job: dict[str, Any]) -> dict[str, Any]:
    return {**job, "files": tuple(FilePlan(**plan) for plan in job["files"])}


def _lower_io_priority() -> None:
    """Let the training's reads go first. Where the kernel does not take it, nothing is lost but politeness."""
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, LOWEST_BEST_EFFORT)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""Tests on several processes: a function on n gloo ranks, and a whole command as a user types it.

`run_ranks` is for what needs a process group and takes milliseconds; `launch` is for what only a real start shows.
Both have a deadline and leave no process behind, whatever happens. Imports nothing of framework/.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]

# The server imports these once; every rank is then a fork of it. pytest is among them because a rank imports the caller's test file.
_FORKSERVER = multiprocessing.get_context("forkserver")
# Those with a dot are what making an engine would import, in seconds; those of the second line what the command line imports.
_FORKSERVER.set_forkserver_preload([
    "torch", "deepspeed", "pytest", "torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer",
    "hydra", "rich.console", "yaml", "fsspec",
])  # fmt: skip


def free_port() -> int:
    """A TCP port of this host that nobody listens on at the moment, from below those that the system gives to connections: between
    this answer and its use one of them would now and then be taken."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(15_000, 32_000)))
            return probe.getsockname()[1]


# ---------------------------------------------------------------- a function on n ranks


@dataclass(frozen=True)
class _Errand:
    """What one rank is told. `work` is the pickled (function, args): plain pickle, so tensors travel as bytes, not as shared memory."""

    rank: int
    world_size: int
    port: int
    work: bytes
    env: Mapping[str, str]
    stacks: str
    group_timeout: float | None


@dataclass(frozen=True)
class _Failure:
    """Why a rank has no result; `when` is the machine's monotonic clock in seconds, the same for all ranks."""

    when: float
    text: str


class _Rank:
    """The parent's end of one rank: its process and the pipe that its answer comes through."""

    def __init__(self, errand: _Errand) -> None:
        self.number, self.stacks = errand.rank, Path(errand.stacks)
        self.inbox, outbox = multiprocessing.Pipe(duplex=False)
        # Not a daemon: daemons may have no children, and ranks start loader workers.
        self.process = _FORKSERVER.Process(target=_rank_main, args=(errand, outbox), name=f"rank {errand.rank}")
        self.process.start()
        outbox.close()

    def answer(self) -> Any:
        """The rank's result or its _Failure; called when the pipe has data or the process has ended."""
        try:
            if self.inbox.poll():
                return pickle.loads(self.inbox.recv_bytes())
        except EOFError:
            pass
        self.process.join(5)
        return _Failure(time.monotonic(), f"the process ended without an answer, exit code {self.process.exitcode}")

    def kill(self) -> None:
        """Kill the rank and its children. The group is the rank's own (setsid), and stands while any of them lives."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.inbox.close()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    init: bool = False,
) -> list[Any]:
    """Run `function(rank, world_size, *args)` on `world_size` fresh processes; the results, in the order of the ranks.

    `function` is defined at the top of its file; arguments and results are pickled. Each rank has RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS set, then `env` on top; a change that the caller made to its own
    os.environ is not seen. `init` makes the gloo process group before the call. `timeout` is in seconds, for everything together.

    Raises AssertionError with the traceback of the rank that failed first, or with every rank's stacks at the deadline.
    """
    deadline = time.monotonic() + timeout
    work, port = pickle.dumps((function, args)), free_port()
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                stacks = f"{folder}/stacks_{rank}"
                ranks.append(_Rank(_Errand(rank, world_size, port, work, env or {}, stacks, timeout if init else None)))
            return _collect(ranks, deadline)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.close()


def _collect(ranks: Sequence[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        open_ranks = [rank for rank in ranks if rank.number not in results]
        sources = [source for rank in open_ranks for source in (rank.inbox, rank.process.sentinel)]
        ready = connection.wait(sources, max(0.0, deadline - time.monotonic()))
        if not ready:
            numbers = ", ".join(str(rank.number) for rank in open_ranks)
            raise AssertionError(f"deadline: no answer from rank {numbers} of {len(ranks)}\n{_dump_stacks(open_ranks)}")
        answers = {rank.number: rank.answer() for rank in open_ranks if rank.inbox in ready or rank.process.sentinel in ready}
        failures = [(answer.when, number, answer.text) for number, answer in answers.items() if isinstance(answer, _Failure)]
        if failures:
            _, number, text = min(failures)
            raise AssertionError(f"rank {number} of {len(ranks)} failed first:\n{text}")
        results.update(answers)
    return [results[rank.number] for rank in ranks]


def _dump_stacks(ranks: Sequence[_Rank], patience: float = 2.0) -> str:
    """Ask the ranks for the stacks of all their threads; faulthandler answers even where a C call hangs."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
    until = time.monotonic() + patience
    while time.monotonic() < until and not all(rank.stacks.exists() and rank.stacks.stat().st_size for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.1)  # the file has begun; let it end
    return "\n".join(f"--- rank {rank.number}\n{rank.stacks.read_text() if rank.stacks.exists() else ''}" for rank in ranks)


def _rank_main(errand: _Errand, outbox: Connection) -> None:
    """The rank's whole life. It ends by the parent's kill: a rank that left early could take the rendezvous store with it."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(errand.stacks, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            answer = pickle.dumps(_do(errand))
        except BaseException:  # SystemExit too: a rank that calls sys.exit has no result
            answer = pickle.dumps(_Failure(time.monotonic(), traceback.format_exc()))
        outbox.send_bytes(answer)
        while True:
            signal.pause()


def _die_with_parent() -> None:
    """A forked rank's parent is the server, which lives as long as its ranks, so PR_SET_PDEATHSIG would not see pytest die."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _do(errand: _Errand) -> Any:
    rank, world, threads = str(errand.rank), str(errand.world_size), max(1, len(os.sched_getaffinity(0)) // errand.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(errand.port), OMP_NUM_THREADS=str(threads))
    os.environ.update(errand.env)
    import deepspeed
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or the first start compiles it, for minutes
    function, args = pickle.loads(errand.work)
    if errand.group_timeout is not None:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=errand.group_timeout))
    return function(errand.rank, errand.world_size, *args)


# ---------------------------------------------------------------- a command, as a user types it


@dataclass(frozen=True)
class Completed:
    """A command that has ended. `left_behind` names the processes of it that were still there, two seconds later (they are gone now)."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    left_behind: tuple[str, ...]


class Job:
    """A running command and everything it has started. Use it in a `with`: leaving the block kills what is left.

    `words` is a module and its arguments: `["framework.train", "recipe=tiny"]`. With `ranks` it runs under the deepspeed launcher,
    without under python. `env` is added to the caller's environment, less what a launcher would have set in it.
    """

    def __init__(self, words: Sequence[str], ranks: int | None, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        self._out, self._err = Path(self._folder.name, "stdout"), Path(self._folder.name, "stderr")
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        # Files, not pipes: an orphan that holds a pipe open would keep the reader waiting.
        with self._out.open("ab") as out, self._err.open("ab") as err:
            self._process = subprocess.Popen(
                _command(words, ranks),
                cwd=cwd,
                env=self._environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        launcher_sets = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: value for name, value in os.environ.items() if name not in launcher_sets}
        kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
        kept.update(PYTHONPATH=str(ROOT), TORCH_EXTENSIONS_DIR=f"{self._folder.name}/extensions", PYTHONFAULTHANDLER="1")
        return {**kept, "TESTS_JOB": self._mark, **extra}

    def processes(self) -> list[psutil.Process]:
        """The living processes of this command, found by a mark in their environment: orphans in other sessions too."""
        found = psutil.process_iter(["environ"])
        return [process for process in found if (process.info["environ"] or {}).get("TESTS_JOB") == self._mark]

    def running(self) -> bool:
        """Whether the outermost process has not ended yet."""
        return self._process.poll() is None

    def output(self) -> tuple[str, str]:
        """stdout and stderr so far."""
        return self._out.read_text(errors="replace"), self._err.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the outermost process alone, as a user's `kill PID` does."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> Completed:
        """Wait for the end. Raises AssertionError, with the output and the stacks of every process, after `timeout` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end(signal.SIGABRT)  # under PYTHONFAULTHANDLER this prints the stacks
            out, err = self.output()
            raise AssertionError(f"still running after {timeout} s\n--- stdout\n{out[-4000:]}\n--- stderr\n{err[-8000:]}") from None
        seconds = time.monotonic() - self._began
        until = time.monotonic() + 2.0
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
        left = tuple(_title(process) for process in self.processes())
        self.end()
        return Completed(code, *self.output(), seconds, left)

    def end(self, first: int = signal.SIGKILL) -> None:
        """Send `first` to every process, and SIGKILL until none is left."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(first)
        until = time.monotonic() + (0.0 if first == signal.SIGKILL else 2.0)
        while remaining := self.processes():
            if time.monotonic() >= until:
                for process in remaining:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.02)
        self._process.wait()


def launch(words: Sequence[str], ranks: int | None, cwd: Path, timeout: float, env: Mapping[str, str] | None = None) -> Completed:
    """Run a command of the project to its end (see Job). Raises AssertionError at the deadline; a non-zero code is a result."""
    with Job(words, ranks, cwd, env) as job:
        return job.wait(timeout)


def _command(words: Sequence[str], ranks: int | None) -> list[str]:
    if ranks is None:
        return [sys.executable, "-m", *words]
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    return [deepspeed, "--num_gpus", str(ranks), "--master_port", str(free_port()), "--module", *words]


def _title(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended)"

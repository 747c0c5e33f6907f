"""A command and every process that comes of it: started together, found together, killed together.

Children are found by a mark in their environment, which they inherit: launchers, ranks, loader workers and checkpoint writers,
in sessions of their own or orphaned. A death signal on the outermost process would not reach them. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from framework.base.errors import RunError
from framework.launch.command import run_environment

T = TypeVar("T")
MARK = "FRAMEWORK_TREE"
KILL_WAIT_S = 60.0
"""How long a killed process may take to be gone: the kernel may have to write back what it maps."""


@dataclass(frozen=True)
class Share:
    """A part of this machine: CPU cores, and the environment that shows a part of its devices."""

    cores: frozenset[int]
    environment: Mapping[str, str]


def shares(parts: int) -> list[Share]:
    """This process's cores and devices in equal parts, without overlap; with more parts than cores or devices some are used twice."""
    cores = sorted(os.sched_getaffinity(0))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = shown.split(",") if shown else [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    return [
        Share(frozenset(_part(cores, part, parts)), {"CUDA_VISIBLE_DEVICES": ",".join(_part(devices, part, parts))} if devices else {})
        for part in range(parts)
    ]


def _part(items: Sequence[T], part: int, parts: int) -> Sequence[T]:
    size = max(1, len(items) // parts)
    start = part * size % len(items)
    return items[start : start + size]


class Tree:
    """A running command. Use it in a `with`: leaving the block kills what is left of it."""

    def __init__(
        self, command: Sequence[str], output: Path, share: Share | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """stdout and stderr go to the file `output`: an orphan that holds a pipe open would keep its reader waiting. `share` is
        the part of the machine that the processes may use; None: all of it. `variables` are added to the environment."""
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        environment = run_environment(os.environ) | dict([self.mark.split("=")]) | dict({} if share is None else share.environment)
        environment |= variables or {}
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                list(command), env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        if share is not None:
            os.sched_setaffinity(self.process.pid, share.cores)  # inherited by all that it starts, which takes it longer than this

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def code(self) -> int | None:
        """Exit code of the outermost process; None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """Ask the outermost process to end: the ranks stop with a checkpoint."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def pids(self) -> list[int]:
        """Every living process of the tree."""
        mark, found = self.mark.encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL every process, and again until none is left. Raises RunError if the kernel does not let go of one."""
        until = time.monotonic() + KILL_WAIT_S
        while left := self.pids():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                raise RunError("processes of a run", f"{left} alive {KILL_WAIT_S:.0f} s after SIGKILL", "none")
            time.sleep(0.01)
        self.process.wait()


PORT_TRIES = 5
"""Starts of the same before a taken port is the user's matter: between its choice and its use another program may take it."""


def port_taken(output: Path) -> bool:
    """Whether what ranks have said into `output` is that another program had their port: StartError of topology/groups.py."""
    said = output.read_text(errors="replace") if output.exists() else ""
    return "MASTER_PORT" in said and "a port in use" in said


def free_port() -> int:
    """A TCP port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

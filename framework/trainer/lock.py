"""run.lock: a run folder is one live run's. Taken by the first rank, left behind by a killed one, told apart by pid and host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.checkpoint.alive import began

NAME = "run.lock"


@dataclass(frozen=True)
class Owner:
    """A process: `began` is its start in the kernel's ticks, so that a pid that was given out again is not taken for it."""

    host: str
    pid: int
    began: int

    @staticmethod
    def me() -> Owner:
        ticks = began(os.getpid())
        assert ticks is not None
        return Owner(socket.gethostname(), os.getpid(), ticks)

    def may_live(self) -> bool:
        """Whether it runs, as far as this host can tell: of another host it cannot."""
        return self.host != socket.gethostname() or began(self.pid) == self.began


def take(folder: Path) -> None:
    """Make the folder this process's. Raises ConfigError where another one lives in it."""
    refuse_living(folder)
    write_atomic(folder / NAME, json.dumps(asdict(Owner.me())).encode())


def refuse_living(folder: Path) -> None:
    """Raise ConfigError if another process that may live holds the folder; one that has died holds nothing."""
    owner = _owner(folder)
    if owner is None or owner == Owner.me() or not owner.may_live():
        return
    got = f"held by process {owner.pid} on {owner.host}"
    remedy = "another name" if owner.host == socket.gethostname() else f"another name; or, if that run is dead, rm {folder / NAME}"
    raise ConfigError(str(folder), got, "a run folder that no live run uses", remedy)


def release(folder: Path) -> None:
    """Let go of the folder, if this process holds it."""
    if _owner(folder) == Owner.me():
        (folder / NAME).unlink()


def _owner(folder: Path) -> Owner | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Owner(**json.loads((folder / NAME).read_text()))
    return None

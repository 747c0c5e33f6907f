"""The log of a process: logs/rank_N.log takes what libraries and our own modules say; the terminal stays for people."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TextIO


class Log(io.TextIOBase):
    """A text stream that remembers what it is told until it has a file; the run folder is claimed late, libraries talk early."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._file: TextIO | None = None
        self.path: Path | None = None

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._file is None:
            self._early.append(text)
        else:
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def open(self, path: Path) -> None:
        """Append to `path` from now on, beginning with what was said so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (open as long as the process)
        self._file.writelines(self._early)
        self._early.clear()


def start_log(verbose: bool) -> Log:
    """Send every logger and warning of this process to a Log; `verbose` includes debug messages."""
    log = Log()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(True)
    return log

"""A file that is written past the page cache, where the file system can: gigabytes that nobody reads soon would cost the training
the memory that the kernel needs for them, and the time to make room. Linux; elsewhere, and on file systems without it, a plain file.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from pathlib import Path

BUFFER = 4 << 20
"""Bytes written at a time; a multiple of every disk's sector."""


class DirectFile(io.RawIOBase):
    """Opened anew for writing. What is written gathers in an aligned buffer and leaves it when that is full."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._handle = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:  # the file system does not take the flag; or the folder no file, which is said again here
            self._handle = os.open(path, flags, 0o666)
        self._buffer = memoryview(mmap.mmap(-1, BUFFER))
        self._filled, self._plain = 0, False

    def fileno(self) -> int:
        return self._handle

    def writable(self) -> bool:
        return True

    def write(self, content: memoryview) -> int:  # type: ignore[override]
        """Take as much as fits. Raises OSError when the disk does not take what is in the buffer."""
        count = min(len(content), BUFFER - self._filled)
        self._buffer[self._filled : self._filled + count] = content[:count]
        self._filled += count
        if self._filled == BUFFER:
            self._leave()
        return count

    def flush(self) -> None:
        """Write what is left. The file goes on as a plain one: its end is on no sector's edge."""
        if self.closed or not self._filled:
            return
        self._become_plain()
        self._leave()

    def close(self) -> None:
        """Without what is still in the buffer: who wants that calls `flush`."""
        if not self.closed:
            self._filled = 0
            super().close()
            os.close(self._handle)

    def _leave(self) -> None:
        rest = self._buffer[: self._filled]
        while rest:
            try:
                rest = rest[os.write(self._handle, rest) :]
            except OSError as error:
                if error.errno != errno.EINVAL or self._plain:
                    raise
            if rest:  # a disk that is nearly full, or a limit: the next write is on no sector's edge, and a plain one says why
                self._become_plain()
        self._filled = 0

    def _become_plain(self) -> None:
        self._plain = True
        fcntl.fcntl(self._handle, fcntl.F_SETFL, 0)

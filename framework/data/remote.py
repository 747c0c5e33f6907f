"""Files behind URLs, by fsspec, read as they come and never copied here; and what to do when a connection breaks.

A read that breaks is tried again from the byte where it broke, of the same file. What cannot be had after some pauses is a letter;
whoever is told by it to start again finds the work that was done before. Nothing here writes.
"""

from __future__ import annotations

import glob
import io
import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any

from framework.base.errors import DataError, FrameworkError, RunError

BLOCK_BYTES, LEAST_BYTES = 8 << 20, 1 << 16
"""What is asked for at once; after each break a quarter of it, and never less than the second: some lines hold no longer."""
TRIES = 6
PAUSE_S = 1.0
"""Seconds before the second try; every further pause is twice as long: half a minute in all."""
MARKS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "created")
"""Where file systems say which version of a file it is, the surest first."""
EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3"}


def find_remote(pattern: str) -> list[tuple[str, int, str]]:
    """(URL, bytes, version) of each file that a URL or a glob in one stands for, sorted; 0 bytes where nobody says how many.

    Raises DataError where there is none, where its driver is not installed, and where it cannot be reached.
    """
    try:
        system, path = _system(pattern)
        magic = glob.has_magic(path.partition("?")[0] if _is_http(pattern) else path)
        names = sorted(system.glob(path)) if magic else [path]
        infos = {name: system.info(name) for name in names}
    except ImportError as error:
        extra = EXTRAS.get(pattern.partition("://")[0])
        write = f"pip install '.[{extra}]'" if extra else ""
        raise DataError(pattern, str(error)[:160], "the package that reads such URLs", write) from None
    except Exception as error:  # those of drivers have nothing in common
        raise DataError(pattern, _said(error), "a URL that can be reached and read") from None
    files = {name: info for name, info in infos.items() if info.get("type") != "directory"}
    if not files:
        raise DataError(pattern, "no such file", "a URL of a file, or a glob that fits one")
    return [(system.unstrip_protocol(name), *_version(info)) for name, info in files.items()]


def bare(path: str) -> str:
    """A path, or a URL without what HTTP puts behind a question mark: signatures, which differ from day to day and are secrets."""
    return path.partition("?")[0] if _is_http(path) else path


class Remote(io.RawIOBase):
    """An open file behind `url`, of the `size` and version that find_remote has seen.

    Raises RunError where reading breaks and does not get better, DataError where the file is another one by then.
    """

    def __init__(self, url: str, size: int, version: str) -> None:
        self._file: Any = None
        self._url, self._seen, self._position = url, (size, version), 0
        self._system, self._path = _system(url)
        self._block = BLOCK_BYTES
        self._streamed = False
        """The server knows no ranges: what lies before a place has to be read as well."""

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, all that are left where it is negative; fewer only at the end."""
        parts: list[bytes] = []
        left = size if size >= 0 else sys.maxsize
        while left and (part := self._some(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _some(self, size: int) -> bytes:
        """At least one of the next `size` bytes, none at the end."""
        for attempt in itertools.count(1):
            try:
                return self._read(min(size, self._block))
            except FrameworkError:
                raise
            except Exception as error:  # those of drivers have nothing in common
                self._let_go()
                if attempt == TRIES:
                    got = f"a connection that broke at byte {self._position:,}, and did again: {_said(error)}"
                    raise RunError(self._url, got, "one that stands", "the same command again, to go on") from None
                self._streamed |= _is_http(self._url) and isinstance(error, ValueError)
            self._block = max(min(LEAST_BYTES, self._block), self._block // 4)
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("it counts to infinity")

    def _read(self, size: int) -> bytes:
        if self._file is None:
            self._file = self._open()
        self._go_to_position()
        got = self._file.read(size)
        if not got and self._position < self._seen[0]:
            raise EOFError("nothing more came")
        self._position += len(got)
        return got

    def _open(self) -> Any:
        if self._position:
            self._system.invalidate_cache()
            if _version(self._system.info(self._path)) != self._seen:
                expected = "a file that stays as it is while it is read"
                raise DataError(self._url, "another file than at the start", expected, "prepare.out=ANOTHER, to begin anew")
        return self._system.open(self._path, "rb", block_size=0 if self._streamed else self._block)

    def _go_to_position(self) -> None:
        if not self._streamed:
            self._file.seek(self._position)
            return
        if self._position < self._file.tell():
            got = "a server that gives files from their beginning only"
            raise DataError(self._url, got, "one that answers to ranges, which this form needs", "data.files=[PATH of a copy]")
        while left := self._position - self._file.tell():
            if not self._file.read(min(left, BLOCK_BYTES)):
                raise EOFError("nothing more came")

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._seen[0]}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._let_go()
        super().close()


def _system(url: str) -> tuple[Any, str]:
    """fsspec's file system, and the path in it. HTTP is asked for the bytes as they lie there, not packed for the way."""
    import fsspec

    if _is_http(url):
        return fsspec.core.url_to_fs(url, headers={"Accept-Encoding": "identity"})
    return fsspec.core.url_to_fs(url)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _version(info: Mapping[str, Any]) -> tuple[int, str]:
    return int(info.get("size") or 0), str(next((info[mark] for mark in MARKS if info.get(mark)), ""))


def _said(error: Exception) -> str:
    """What an error says, or what was behind it: fsspec calls a server that is not there a file that is not there."""
    first = error.__cause__ or error
    return f"{type(first).__name__}: {first}"[:160]

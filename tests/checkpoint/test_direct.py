"""A file past the page cache holds what was written, whatever the pieces; and says so when the disk does not take it."""

from __future__ import annotations

import os
import random
import resource
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest

from framework.checkpoint.direct import BUFFER, DirectFile


def written(path: Path, pieces: list[bytes]) -> bytes:
    file = DirectFile(path)
    for piece in pieces:
        left = memoryview(piece)
        while left:
            left = left[file.write(left) :]
    file.flush()
    file.close()
    return path.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 511, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 3 * BUFFER + 12345])
def test_it_holds_what_was_written(size: int, tmp_path: Path) -> None:
    draw = random.Random(size)
    content = draw.randbytes(size)
    cuts = sorted(draw.randrange(size + 1) for _ in range(7))
    pieces = [content[start:stop] for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
    assert written(tmp_path / "file", pieces) == content


def test_it_begins_anew(tmp_path: Path) -> None:
    written(tmp_path / "file", [b"x" * 10000])
    assert written(tmp_path / "file", [b"short"]) == b"short"


def test_it_goes_on_after_a_flush(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "file")
    file.write(memoryview(b"one"))
    file.flush()
    file.write(memoryview(b"two"))
    file.flush()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"onetwo"


def test_a_memory_file_system_does_as_well() -> None:
    path = Path(f"/dev/shm/direct-{os.getpid()}")
    try:
        assert written(path, [b"y" * (BUFFER + 5)]) == b"y" * (BUFFER + 5)
    finally:
        path.unlink()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "none" / "file")


def limited(path: str, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        written(Path(path), [b"z" * (2 * BUFFER)])
    except OSError as error:
        os._exit(10 if "too large" in str(error) else 11)
    os._exit(0)


@pytest.mark.parametrize("limit", [4096, BUFFER + 1000, 2 * BUFFER - 1])
def test_a_limit_is_told(limit: int, tmp_path: Path) -> None:
    process = get_context("fork").Process(target=limited, args=(str(tmp_path / "file"), limit))
    process.start()
    process.join(30)
    assert process.exitcode == 10

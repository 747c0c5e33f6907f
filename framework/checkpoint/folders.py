"""Where one checkpoint is being written: a local folder, or a place behind an fsspec URL. No torch.

Both keep one rule: the manifest comes last. Locally everything is written beside the checkpoints in a temporary folder,
which is renamed when it is complete; behind a URL there is no rename, and a folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from framework.checkpoint.alive import began
from framework.checkpoint.direct import DirectFile
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.manifest import MANIFEST, File, Manifest, step_name

TEMPORARY = ".tmp-"
TRASH = ".trash-"
ABANDONED_S = 3600.0
"""A process of another host, whom we cannot ask, counts as gone after writing nothing for so long."""


class Attempt(Protocol):
    """One try at writing one checkpoint, shared by all its ranks. `faults` are what the disk or the driver may raise."""

    faults: tuple[type[Exception], ...]

    def begin(self, rank: int) -> None:
        """Be there for the other ranks to see, from now until `end`."""
        ...

    def end(self, rank: int) -> None: ...

    def create(self, name: str) -> BinaryIO: ...

    def flush(self, file: BinaryIO) -> None:
        """Have what was written to the file survive a power cut."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write a small file so that nobody sees half of it."""
        ...

    def get(self, name: str) -> bytes | None: ...

    def remove(self, name: str) -> None: ...

    def take_over(self, folder: str, name: str) -> File:
        """Have file `name` of the complete checkpoint `folder` in this one as well."""
        ...

    def working(self, ranks: list[int]) -> bool:
        """Whether a process that writes for one of `ranks` may still be alive."""
        ...

    def publish(self, manifest: Manifest, rank: int) -> None:
        """Make it a checkpoint, and end the work of `rank`."""
        ...


def open_attempt(root: str, step: int, name: str) -> Attempt:
    """`root` is an absolute folder or a URL; `name` is the same for all ranks of one try and of no other try."""
    return RemoteAttempt(root, step) if "://" in root else LocalAttempt(Path(root), step, name)


class LocalAttempt:
    """A temporary folder beside the checkpoints. Raises OSError where the disk does."""

    faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, root: Path, step: int, name: str) -> None:
        assert root.is_absolute(), f"{root}: a writer process works in another folder"
        self.name = name
        self.final = root / step_name(step)
        self.folder = root / f"{TEMPORARY}{step_name(step)}-{name}"

    def begin(self, rank: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mark(rank).write_text(json.dumps(owner(os.getpid())))

    def end(self, rank: int) -> None:
        self._mark(rank).unlink(missing_ok=True)

    def create(self, name: str) -> BinaryIO:
        return cast(BinaryIO, DirectFile(self.folder / name))

    def flush(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def put(self, name: str, content: bytes) -> None:
        temporary = self.folder / f"{name}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)
        flush_names(self.folder)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def take_over(self, folder: str, name: str) -> File:
        source = self.final.parent / folder
        try:
            os.link(source / name, self.folder / name)
        except PermissionError:  # a file system without hard links
            shutil.copyfile(source / name, self.folder / name)
        return Manifest.decode((source / MANIFEST).read_bytes(), str(source)).file(name)

    def working(self, ranks: list[int]) -> bool:
        return any(is_working(self._mark(rank)) for rank in ranks)

    def publish(self, manifest: Manifest, rank: int) -> None:
        self.put(MANIFEST, manifest.encode())  # flushes the folder as well
        self.end(rank)  # not before: until the manifest is there, a sweep has to see that somebody is at work
        if self.final.exists():
            discard(self.final)  # the same step, written again after a restart from an earlier one
        try:
            os.rename(self.folder, self.final)
        except FileNotFoundError:
            # A sweep that found the manifest may have done the rename for us.
            if Manifest.decode((self.final / MANIFEST).read_bytes(), str(self.final)).attempt != self.name:
                raise
        flush_names(self.final.parent)

    def _mark(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.writing"


class RemoteAttempt:
    """A folder behind an fsspec URL: files first, the manifest last."""

    faults: tuple[type[Exception], ...] = (Exception,)  # drivers have nothing in common: a lost connection to S3 is no OSError

    def __init__(self, root: str, step: int) -> None:
        self.files, path = filesystem(root)
        self.root, self.folder = path, f"{path}/{step_name(step)}"

    def begin(self, rank: int) -> None:
        self.files.makedirs(self.folder, exist_ok=True)
        if rank == 0:
            self.remove(MANIFEST)  # the same step, written again: from here on it is incomplete

    def end(self, rank: int) -> None: ...

    def create(self, name: str) -> BinaryIO:
        return self.files.open(f"{self.folder}/{name}", "wb")

    def flush(self, file: BinaryIO) -> None: ...

    def put(self, name: str, content: bytes) -> None:
        self.files.pipe_file(f"{self.folder}/{name}", content)

    def get(self, name: str) -> bytes | None:
        self.files.invalidate_cache()
        try:
            return self.files.cat_file(f"{self.folder}/{name}")
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{self.folder}/{name}")

    def take_over(self, folder: str, name: str) -> File:
        self.files.cp_file(f"{self.root}/{folder}/{name}", f"{self.folder}/{name}")
        return Manifest.decode(self.files.cat_file(f"{self.root}/{folder}/{MANIFEST}"), folder).file(name)

    def working(self, ranks: list[int]) -> bool:
        return True  # nobody can be asked: the time limit decides

    def publish(self, manifest: Manifest, rank: int) -> None:
        known = {file.name for file in manifest.files}
        self.files.invalidate_cache()
        for path in self.files.ls(self.folder, detail=False):
            if (name := path.rpartition("/")[2]) not in known:  # left by a try on more ranks
                self.remove(name)
        self.put(MANIFEST, manifest.encode())


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL or a local path, and the path in it. Raises CheckpointError where its driver is not installed."""
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(url, str(error), "a URL that fsspec can open", "install its driver, or give a local folder") from error
    return files, path.rstrip("/")


def flush_names(folder: Path) -> None:
    """Have the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(folder: Path) -> None:
    """Remove a folder so that at no time a part of it looks like the whole."""
    trash = folder.with_name(f"{TRASH}{folder.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)  # what is left of it goes with the next sweep


def owner(pid: int) -> dict[str, Any]:
    """Who a process is; `start` is None where it does not live."""
    return {"host": f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", "pid": pid, "start": began(pid)}


def is_working(mark: Path) -> bool:
    """Whether the process that left `mark` is alive; on another host: whether anything beside the mark changed lately."""
    try:
        given = json.loads(mark.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    if given["host"] == owner(os.getpid())["host"]:
        return owner(given["pid"]) == given and given["start"] is not None
    latest = max((path.stat().st_mtime for path in mark.parent.iterdir()), default=0.0)
    return time.time() - latest < ABANDONED_S

"""The checkpoints of a run in one place: which are complete, is one sound, throwing old ones away. No torch.

`Store(root)` takes a local folder or an fsspec URL. What has no manifest, or files that are missing or of another size, is
not a checkpoint, whatever its name. Steps are compared as integers; names and times of files mean nothing.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from framework.checkpoint.errors import CheckpointError, SaveError, said
from framework.checkpoint.folders import TEMPORARY, TRASH, discard, filesystem, is_working
from framework.checkpoint.manifest import MANIFEST, Manifest, step_name, step_of
from framework.checkpoint.read import Checked, open_reader
from framework.checkpoint.shards import Piece, index

ASIDE = "aside_"
"""Before the name of what belongs to another line of the run and counts no more."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its manifest, and the fsspec file system and path where its files lie."""

    manifest: Manifest
    files: Any
    path: str
    is_local: bool

    @property
    def step(self) -> int:
        return self.manifest.step

    @cached_property
    def pieces(self) -> dict[tuple[str, str], list[Piece]]:
        """Everything that is kept, by (kind, name)."""
        return index(piece for file in self.manifest.files for piece in file.pieces())

    def shapes(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """The logical shape of every tensor that is kept, by (kind, name)."""
        rows = [(row[0], row[1], file.shapes) for file in self.manifest.files for row in file.shards]
        return {(kind, name): tuple(shapes[name]) for kind, name, shapes in rows}


@dataclass
class Scan:
    """What a store holds: complete checkpoints by step, letters about damaged ones, names of unfinished ones."""

    complete: list[Checkpoint] = field(default_factory=list)
    damaged: list[CheckpointError] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


class Store:
    """All checkpoints below one folder or URL."""

    def __init__(self, root: str) -> None:
        self.is_local = "://" not in root
        self.root = str(Path(root).absolute()) if self.is_local else root.rstrip("/")
        self.files, self.path = filesystem(self.root)

    def scan(self) -> Scan:
        """Look at everything; the only place that decides what counts."""
        found = Scan()
        for name in sorted(self._sizes("")):
            if step_of(name) is None:
                found.unfinished += [name] if name.startswith((TEMPORARY, TRASH)) else []
            elif not self.is_local and MANIFEST not in (sizes := self._sizes(name)):
                found.unfinished += [] if f"{ASIDE}{MANIFEST}" in sizes else [name]
            else:
                try:
                    found.complete.append(self.open(name))
                except CheckpointError as error:
                    found.damaged.append(error)
        found.complete.sort(key=lambda checkpoint: checkpoint.step)
        return found

    def complete(self) -> list[Checkpoint]:
        """The complete checkpoints, lowest step first."""
        return self.scan().complete

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest step; None where nothing was ever saved.

        Raises CheckpointError where there are checkpoints but none is whole: to start again from zero is for the user to decide.
        """
        found = self.scan()
        if not found.complete and found.damaged:
            raise found.damaged[-1]
        return found.complete[-1] if found.complete else None

    def open(self, name: str) -> Checkpoint:
        """The checkpoint in folder `name`. Raises CheckpointError if it is missing, incomplete, damaged or from a newer format."""
        where, sizes = f"{self.root}/{name}", self._sizes(name)
        if MANIFEST not in sizes:
            got = "no manifest.json" if sizes else "nothing there"
            raise CheckpointError(where, got, "a complete checkpoint", f"one of {[item for item in self._sizes('') if step_of(item)]}")
        manifest = Manifest.decode(self.files.cat_file(f"{self.path}/{name}/{MANIFEST}"), f"{where}/{MANIFEST}")
        if step_of(name) not in (None, manifest.step):
            raise CheckpointError(where, f"the manifest of {step_name(manifest.step)}", "the step in the folder's name")
        for file in manifest.files:
            if sizes.get(file.name) != file.size:
                got = f"{sizes[file.name]} bytes" if file.name in sizes else "no such file"
                raise CheckpointError(f"{where}/{file.name}", got, f"{file.size} bytes", "take an older checkpoint")
        return Checkpoint(manifest, self.files, f"{self.path}/{name}", self.is_local)

    def verify(self, checkpoint: Checkpoint) -> None:
        """Read all files again and compare checksums. Raises CheckpointError where one was changed, or is not in the manifest."""
        self.refuse_extra(checkpoint)
        for file in checkpoint.manifest.files:
            with Checked(open_reader(checkpoint.files, f"{checkpoint.path}/{file.name}", checkpoint.is_local), file) as reader:
                reader.finish()

    def refuse_extra(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if there are files that are not in the manifest."""
        name = checkpoint.path.rpartition("/")[2]
        known = {MANIFEST, *(file.name for file in checkpoint.manifest.files)}
        if extra := sorted(self._sizes(name).keys() - known):
            got = f"files that are not in the manifest: {extra}"
            raise CheckpointError(f"{self.root}/{name}", got, f"only {sorted(known)}", "move them elsewhere")

    def prune(self, written: int, keep_last: int, keep_every: int = 0, keep_best: Collection[int] = ()) -> list[int]:
        """Throw away what `retained` does not name, once step `written` is complete; before that nothing. Returns the steps.

        Raises SaveError where the place cannot be written.
        """
        found = self.scan()
        steps = {checkpoint.step for checkpoint in found.complete}
        if written not in steps:
            return []
        gone = sorted(steps - retained(steps, written, keep_last, keep_every, keep_best))
        # Behind a URL, where nobody sweeps: one save at a time, so an unfinished one below the newest is dead.
        dead = [] if self.is_local else [name for name in found.unfinished if (step_of(name) or written) < written]
        with self._changing():
            for name in (*map(step_name, gone), *dead):
                self._remove(name)
        return gone

    def set_aside(self, above: int) -> list[str]:
        """Have every step above `above`, complete or not, count no more. Returns the names under which they are kept now.

        A local folder gets another name. Behind a URL the manifest does, and the files stay until that step is saved again.
        Raises SaveError where the place cannot be written.
        """
        names = sorted(name for name in self._sizes("") if (step_of(name) or 0) > above)
        with self._changing():
            return [kept for name in names if (kept := self._rename(name))]

    def _rename(self, name: str) -> str | None:
        """What has no manifest behind a URL counts for nothing already: None."""
        if self.is_local:
            kept = f"{ASIDE}{name}-{uuid.uuid4().hex[:8]}"
            os.rename(Path(self.root, name), Path(self.root, kept))
            return kept
        if MANIFEST not in self._sizes(name):
            return None
        kept = f"{name}/{ASIDE}{MANIFEST}"
        self.files.cp_file(f"{self.path}/{name}/{MANIFEST}", f"{self.path}/{kept}")
        self.files.rm_file(f"{self.path}/{name}/{MANIFEST}")
        return kept

    def sweep(self) -> list[str]:
        """Clean up after processes that died while they wrote or deleted. Returns the names of the folders that were dealt with.

        A folder that was complete but for its new name gets it. Nothing is done behind a URL: nobody there tells who is alive.
        """
        swept = [name for name in self._sizes("") if self.is_local and name.startswith((TEMPORARY, TRASH))]
        swept = [name for name in swept if not any(map(is_working, Path(self.root, name).glob("*.writing")))]
        for name in swept:
            if name.startswith(TRASH) or not self._finish(name):
                shutil.rmtree(Path(self.root, name), ignore_errors=True)
        return swept

    def _finish(self, name: str) -> bool:
        try:
            target = Path(self.root, step_name(self.open(name).step))
        except CheckpointError:
            return False
        if target.exists():
            return False
        for mark in Path(self.root, name).glob("*.writing"):
            mark.unlink()
        os.rename(Path(self.root, name), target)
        return True

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What the disk or a driver raises inside the block becomes a SaveError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise SaveError(self.root, said(error), "a place that can be written") from error

    def _remove(self, name: str) -> None:
        if self.is_local:
            discard(Path(self.root, name))
            return
        if MANIFEST in self._sizes(name):
            self.files.rm_file(f"{self.path}/{name}/{MANIFEST}")
        self.files.rm(f"{self.path}/{name}", recursive=True)

    def _sizes(self, name: str) -> dict[str, int]:
        """Size in bytes by name of everything in folder `name`; empty if it is not there."""
        self.files.invalidate_cache()
        try:
            entries = self.files.ls(f"{self.path}/{name}".rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except Exception as error:  # those of drivers have nothing in common
            raise CheckpointError(f"{self.root}/{name}", said(error), "a place that can be reached and read") from error
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry["size"] for entry in entries}


def find(where: str) -> tuple[str, str] | None:
    """(root, folder name) of the checkpoint that a path means: a step's folder, or the newest of a checkpoints folder or a run folder.

    None where there is none. Raises CheckpointError as `newest` does.
    """
    where = where.rstrip("/")
    root, _, name = where.rpartition("/")
    if step_of(name) is not None:
        return root or ".", name
    for root in (where, f"{where}/checkpoints"):
        newest = Store(root).newest()
        if newest is not None:
            return root, step_name(newest.step)
    return None


def retained(steps: Collection[int], written: int, keep_last: int, keep_every: int, keep_best: Collection[int]) -> set[int]:
    """Which complete `steps` stay after step `written` was saved.

    The last `keep_last` up to `written` (0: all), the multiples of `keep_every` (0: none), `keep_best`, and always `written`
    itself. Steps above `written` come from another line of the run: they stay, and do not count.
    """
    own = sorted(step for step in steps if step <= written)
    every = {step for step in own if keep_every and step % keep_every == 0}
    return {*own[-keep_last:], *every, *keep_best, written, *(step for step in steps if step > written)}


def free_bytes(folder: str) -> int:
    """Bytes that an unprivileged process can still write below a local folder, which need not exist yet."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize

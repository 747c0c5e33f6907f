"""The memory tier: State in plain files under the shared-memory file system. They outlive every process, not the host.

One folder for each run folder and user. It goes when its run is done; what a run left that nobody can go on with is swept.
"""

from __future__ import annotations

import getpass
import hashlib
import shutil
import tempfile
from pathlib import Path

from framework.base.errors import ConfigError
from framework.checkpoint.store import free_bytes
from framework.monitor.runfile import RunFile

SHARED_MEMORY = Path("/dev/shm")
OWNER = "run"
"""A file in the tier's folder: the path of the run folder that it belongs to."""


def memory_root(run_dir: str) -> Path:
    """The folder of the run at `run_dir`, whether it exists or not."""
    word = hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]
    return _base() / f"{_prefix()}{word}"


def prepare(run_dir: str, nbytes: int) -> None:
    """Make the folder. `nbytes` is one State of all ranks; a second one is written before the first goes.

    Raises ConfigError where shared memory has too little room.
    """
    root = memory_root(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNER).write_text(str(Path(run_dir).resolve()))
    free, kept = free_bytes(str(root)), sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    if free + kept < 2 * nbytes:
        remove(run_dir)
        got = f"{free} bytes free in {root.parent}"
        raise ConfigError("checkpoint.memory_every", got, f"{2 * nbytes} bytes for two States of all ranks", "checkpoint.memory_every=0")


def remove(run_dir: str) -> None:
    """Nobody needs the tier of this run any more."""
    shutil.rmtree(memory_root(run_dir), ignore_errors=True)


def sweep() -> list[Path]:
    """Remove this user's folders whose run is gone or done; the run folders that they belonged to."""
    swept = []
    for root in _base().glob(f"{_prefix()}*"):
        owner = root / OWNER
        run_dir = Path(owner.read_text()) if owner.is_file() else None
        if run_dir is not None and not _is_over(run_dir):
            continue
        shutil.rmtree(root, ignore_errors=True)
        swept.append(run_dir or root)
    return swept


def _is_over(run_dir: Path) -> bool:
    return not (run_dir / "config.yaml").exists() or RunFile(run_dir / "run.json").status == "done"


def _base() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"framework-{getpass.getuser()}-"

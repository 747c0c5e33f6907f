"""Writing files so that a reader sees the old content or the new, never half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new name inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary name beside `path`, flush to disk, rename into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Atomically write `value` as indented JSON with a final newline."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())

"""What a token file says of itself: OUT.json beside OUT.bin and OUT.idx. Files of other tools have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MADE_BY = "framework.prepare"


def manifest_path(prefix: str | Path) -> Path:
    """Where the manifest of the token file `prefix` (without .bin/.idx) lies, if it has one."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest of a token file (preparing.py writes it); None where there is none, or a JSON file of somebody else."""
    try:
        manifest = json.loads(manifest_path(prefix).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("made_by") == MADE_BY else None

"""What makes two configs the same run: the hash of the `meaning` settings, and the list of differences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from framework.base.errors import ConfigError
from framework.config.check import value_at
from framework.config.compose import leaves
from framework.config.schema import Config


@dataclass(frozen=True)
class Change:
    """A setting that differs between two configs."""

    key: str
    tag: str
    old: Any
    new: Any


def meaning_hash(config: Config) -> str:
    """16 hex digits over every setting tagged `meaning`: equal for two starts of the same run."""
    return _digest({key: value_at(config, key) for key, _, spec in leaves() if spec.metadata["tag"] == "meaning"})


def full_hash(config: Config) -> str:
    """16 hex digits over every setting: equal on all ranks of one start."""
    return _digest({key: value_at(config, key) for key, _, _ in leaves()})


def changes(old: Config, new: Config) -> list[Change]:
    """Every setting whose value differs, in the schema's order."""
    return [
        Change(key, spec.metadata["tag"], value_at(old, key), value_at(new, key))
        for key, _, spec in leaves()
        if value_at(old, key) != value_at(new, key)
    ]


def refuse_changes(listed: list[Change], config: Config, where: str) -> None:
    """Raise ConfigError if `listed` changes what is learned and resume_changes does not allow it."""
    meant = [change for change in listed if change.tag == "meaning"]
    if not meant or config.resume_changes == "allow":
        return
    rows = "\n".join(f"            {change.key}: {change.old} there, {change.new} now" for change in meant)
    write = "name=ANOTHER, resume=never to keep the old run beside the new, or resume_changes=allow to go on all the same"
    raise ConfigError("name", f"{where}, a run of other settings:\n{rows}", "the same settings", write)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

"""Two runs held against each other: what differs in settings and environment, and where their losses part. Pure; no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from framework.config.check import value_at
from framework.config.compose import leaves
from framework.config.identity import changes
from framework.studies.story import Columns, Settings, Story

FAR = 1e-3
"""Losses that differ by a larger share are told apart at a glance."""
ABSENT = "not there"
TAGS = ("meaning", "layout", "free")


@dataclass(frozen=True)
class Difference:
    """A setting or a fact that is not the same here and there, in words."""

    key: str
    tag: str
    here: str
    there: str


def setting_differences(here: Settings, there: Settings) -> list[Difference]:
    """What decides what is learned first. Keys that this version does not know are compared as they are written."""
    unknown = {**here.unknown, **there.unknown}
    known = [change for change in changes(here.config, there.config) if change.key not in unknown]
    known.sort(key=lambda change: TAGS.index(change.tag))
    found = [Difference(change.key, change.tag, _yaml(change.old), _yaml(change.new)) for change in known]
    for key in unknown:
        ours, theirs = _written(here, key), _written(there, key)
        if ours != theirs:
            found.append(Difference(key, "not known here", ours, theirs))
    return found


def _written(settings: Settings, key: str) -> str:
    if key in settings.unknown:
        return str(settings.unknown[key])
    known = {name for name, _, _ in leaves()}
    return _yaml(value_at(settings.config, key)) if key in known else ABSENT


def _yaml(value: Any) -> str:
    """As it stands in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """What run.json says of where and how the run was started, in words; a part that is not known is left out."""
    world = facts.get("world") or {}
    found: dict[str, Any] = {
        "ranks": world.get("size"),
        "hosts": ", ".join(world.get("hosts") or ()) or None,
        "git commit": facts.get("git_commit"),
        "command": shlex.join(facts["command"]) if facts.get("command") else None,
        **(facts.get("versions") or {}),
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def environment_differences(here: Story, there: Story) -> list[Difference]:
    ours, theirs = environment(here.facts), environment(there.facts)
    rows = [Difference(key, "environment", ours.get(key, ABSENT), theirs.get(key, ABSENT)) for key in {**ours, **theirs}]
    return [row for row in rows if row.here != row.there]


@dataclass(frozen=True)
class Parting:
    """Where two curves of losses part: `last` is the last step that both have (0: none), `bits` the first step at which they are
    not the same number, `far` the first at which they differ by more than FAR of the larger one."""

    last: int
    bits: int | None
    far: int | None

    @property
    def says(self) -> str:
        if not self.last:
            return "There is no step that both runs have."
        if self.bits is None:
            return f"The losses are equal to the last step both have ({self.last:,}), bit for bit."
        begin = f"The losses part at step {self.bits:,}: there they are not bit-equal for the first time."
        if self.far is None:
            return f"{begin} They stay within {FAR:.1%} to the last step both have ({self.last:,})."
        return f"{begin} {'There' if self.far == self.bits else f'At step {self.far:,}'} they differ by more than {FAR:.1%}."


def parting(here: Columns, there: Columns) -> Parting:
    """Of the losses of the steps that both have. NaN is equal to NaN, -0.0 is not 0.0, what is finite is far from what is not."""
    steps, ours, theirs = np.intersect1d(here.steps, there.steps, assume_unique=True, return_indices=True)
    one, other = here["loss"][ours], there["loss"][theirs]
    unequal = (one.view(np.int64) != other.view(np.int64)) & ~(np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= FAR * np.maximum(np.abs(one), np.abs(other))
    finite = np.isfinite(one) & np.isfinite(other)
    far = unequal & ~(finite & near)
    return Parting(int(steps[-1]) if len(steps) else 0, _first(steps, unequal), _first(steps, far))


def _first(steps: np.ndarray, where: np.ndarray) -> int | None:
    return int(steps[where.argmax()]) if where.any() else None

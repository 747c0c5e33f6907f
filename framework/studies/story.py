"""What a run folder tells, as plain data: settings, numbers by step, events. Reads files and nothing else; no torch, no plotly.

The files may be of a run that goes on, was killed, or was written by another version of the framework.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from framework.base.errors import ConfigError
from framework.config.compose import build
from framework.config.schema import Config
from framework.monitor.page import size, span
from framework.monitor.sinks import read_lines

PARTS = ("forward", "backward", "recompute", "optimizer", "communication", "data", "checkpoint", "other")
"""Of a step, exclusive: they add up to step_time_s."""
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "memory_bytes", "hidden_s", "mfu")
BLOCKS = {"parts": "part ", "aside_s": "aside "}
"""Of metrics.jsonl the keys that hold a block of seconds -> what their names begin with in Columns."""
BUCKETS = 400
"""Points of a curve, at most."""
LONGEST_WORDS = 240


@dataclass(frozen=True)
class Columns:
    """Numbers by step. steps [n] int64 ascend, each once; values: name -> [n] float64, NaN where a line has no such number."""

    steps: np.ndarray
    values: Mapping[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        """[n]; all NaN for a name that no line has."""
        return self.values.get(name, np.full(len(self.steps), math.nan))

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())

    def named(self, prefix: str) -> list[str]:
        """What stands behind `prefix` in the names that begin with it."""
        return [name.removeprefix(prefix) for name in self.values if name.startswith(prefix)]


@dataclass(frozen=True)
class Settings:
    """config.yaml: what this version understands of it, what it does not (dotted key -> value), and the text itself."""

    config: Config
    unknown: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl in words; `change` is what to write to make it better."""

    step: int
    kind: str
    says: str
    change: str = ""


@dataclass(frozen=True)
class Story:
    """All that is read of one run; `facts` are those of run.json."""

    folder: Path
    settings: Settings
    facts: Mapping[str, Any]
    train: Columns
    held_out: Columns
    events: tuple[Event, ...]
    operators: tuple[Mapping[str, Any], ...]

    @property
    def name(self) -> str:
        return self.settings.config.name


def read_story(folder: Path, key: str) -> Story:
    """The run in `folder`, which the setting `key` names. Raises ConfigError where it is no run, or its files are damaged."""
    if not (folder / "config.yaml").is_file():
        got = f"{folder}, " + ("which holds no config.yaml" if folder.is_dir() else "which is no folder")
        raise ConfigError(key, got, "the folder of a run", f"{key}=runs/NAME")
    try:
        settings = read_settings((folder / "config.yaml").read_text(), key, folder)
        facts = _json(folder / "run.json", {})
        operators = _json(folder / "profile" / "ops.json", [])
        metrics = read_columns(folder / "metrics.jsonl")
        lines = [*read_lines(folder / "events.jsonl")]
    except (OSError, ValueError) as error:
        raise ConfigError(key, f"{folder}: {error}", "files of a run that can be read", f"{key}=runs/NAME") from None
    events = tuple(sorted([*map(event, lines), *not_finite(metrics["train"])], key=lambda each: each.step))
    return Story(folder, settings, facts, metrics["train"], metrics["eval"], events, tuple(operators))


def _json(path: Path, otherwise: Any) -> Any:
    """Raises ValueError that names the file."""
    if not path.exists():
        return otherwise
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(found, type(otherwise)):
        raise ValueError(f"{path.name}: not a {type(otherwise).__name__}")
    return found


def read_settings(text: str, key: str, folder: Path) -> Settings:
    """What config.yaml says. What this version does not know or refuses is put aside, and the default stands in for it."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(key, f"{folder}/config.yaml: {error}", "the config.yaml that a run writes") from None
    if not isinstance(values, dict):
        raise ConfigError(key, f"{folder}/config.yaml, which holds no settings", "the config.yaml that a run writes")
    unknown: dict[str, Any] = {}
    while True:
        try:
            return Settings(build(Config, values), unknown, text)
        except ConfigError as error:
            unknown[error.subject] = _take_out(values, error.subject)


def _take_out(values: dict[str, Any], key: str) -> Any:
    *blocks, name = key.split(".")
    for block in blocks:
        values = values[block]
    return values.pop(name)


# ---------------------------------------------------------------- numbers


class _Rows:
    """Columns as they grow, line by line; of a step that was done twice the last line holds. 8 bytes a number."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.count = 0
        self.columns: dict[str, array[float]] = {}

    def add(self, step: int, numbers: Iterator[tuple[str, float]]) -> None:
        for name, value in numbers:
            column = self.columns.setdefault(name, array("d"))
            column.extend([math.nan] * (self.count - len(column)))
            column.append(value)
        self.rows[step] = self.count
        self.count += 1

    def columns_by_step(self) -> Columns:
        steps = np.array(sorted(self.rows), dtype=np.int64)
        order = np.array([self.rows[step] for step in steps.tolist()], dtype=np.int64)
        for column in self.columns.values():
            column.extend([math.nan] * (self.count - len(column)))
        return Columns(steps, {name: np.array(column)[order] for name, column in self.columns.items()})


def read_columns(path: Path) -> dict[str, Columns]:
    """The lines of metrics.jsonl by their kind, train and eval; empty columns where there is no file."""
    kinds = {"train": _Rows(), "eval": _Rows()}
    for line in read_lines(path):
        if line.get("kind") in kinds:
            kinds[line["kind"]].add(line["step"], _numbers(line))
    return {kind: rows.columns_by_step() for kind, rows in kinds.items()}


def _numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in NUMBERS:
        if line.get(name) is not None:
            yield name, float(line[name])
    for block, prefix in BLOCKS.items():
        for name, seconds in (line.get(block) or {}).items():
            yield prefix + name, float(seconds)


@dataclass(frozen=True)
class Curve:
    """A column in few points, [m] each: the median of every bucket of steps, and what lies lowest and highest in it.

    NaN where a bucket has no finite value. `whole`: every step is a bucket of its own.
    """

    steps: np.ndarray
    middle: np.ndarray
    least: np.ndarray
    most: np.ndarray
    whole: bool


def edges(count: int, buckets: int = BUCKETS) -> np.ndarray:
    """[m + 1] places where `count` values are cut into at most `buckets` runs of equal length, within one."""
    return np.linspace(0, count, min(count, buckets) + 1).round().astype(np.int64)


def curve(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> Curve:
    """`values` [n] at `steps` [n] in at most `buckets` points; a point stands at the middle step of its bucket."""
    finite = np.where(np.isfinite(values), values, math.nan)
    cuts = edges(len(steps), buckets)
    found = [_spread(finite[low:high]) for low, high in pairwise(cuts)]
    middle, least, most = np.array(found).reshape(-1, 3).T
    return Curve(steps[(cuts[:-1] + cuts[1:] - 1) // 2], middle, least, most, len(steps) <= buckets)


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    there = values[~np.isnan(values)]
    return (float(np.median(there)), float(there.min()), float(there.max())) if len(there) else (math.nan, math.nan, math.nan)


def split(train: Columns, buckets: int = BUCKETS) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Where a step's time goes: steps [m] and part -> seconds of a step [m].

    Parts of the step are medians of the buckets; what comes aside (an evaluation) is rare, and spread over the steps of its bucket.
    """
    known = train.named("part ")
    order = [name for name in (*PARTS, *sorted(set(known) - {*PARTS})) if name in known]
    stacks = {name: np.nan_to_num(curve(train.steps, train[f"part {name}"], buckets).middle) for name in order}
    cuts = edges(len(train.steps), buckets)
    for name in train.named("aside "):
        total = np.concatenate([[0.0], np.nancumsum(train[f"aside {name}"])])
        stacks[f"{name}, between steps"] = np.diff(total[cuts]) / np.maximum(np.diff(cuts), 1)
    return train.steps[(cuts[:-1] + cuts[1:] - 1) // 2], stacks


def brief(seconds: float) -> str:
    """A duration: three figures below a minute, as on a clock above."""
    return f"{seconds:.3g} s" if seconds < 59.95 else span(seconds)


# ---------------------------------------------------------------- events


def event(line: Mapping[str, Any]) -> Event:
    """A line of events.jsonl in words."""
    kind = str(line.get("event"))
    step = int(line.get("step") or line.get("after_step") or 0)
    words = {"alert": _alert, "checkpoint": _checkpoint, "resume": _resume, "restart": _restart, "rollback": _rollback, "signal": _signal}
    says = words.get(kind, _other)(line)
    return Event(step, kind, says if len(says) <= LONGEST_WORDS else says[: LONGEST_WORDS - 3] + "...", str(line.get("change") or ""))


def _alert(line: Mapping[str, Any]) -> str:
    rank = line.get("rank")
    return f"{line.get('alert')}{'' if rank is None else f', rank {rank}'}: {line.get('says')}"


def _checkpoint(line: Mapping[str, Any]) -> str:
    took = f"waited {brief(line.get('stall_s', 0.0))}, written in {brief(line.get('write_s', 0.0))}"
    return f"{line.get('kind')}, {size(line.get('bytes', 0))}, {took}"


def _resume(line: Mapping[str, Any]) -> str:
    passed = [f"passed over {name}" for name in line.get("passed_over", ())]
    return "; ".join([f"from {line.get('from')}", *passed, *map(str, line.get("changes", ()))])


def _restart(line: Mapping[str, Any]) -> str:
    return f"start {line.get('start')}, because {line.get('because')}"


def _rollback(line: Mapping[str, Any]) -> str:
    more = _other({key: value for key, value in line.items() if key != "to"})
    return f"back to the state of step {line.get('to')}{'; ' if more else ''}{more}"


def _signal(line: Mapping[str, Any]) -> str:
    because = line.get("because")
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in because.items()) if isinstance(because, dict) else str(because)


def _other(line: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in line.items() if key not in ("event", "step", "change") and value is not None)


def not_finite(train: Columns) -> list[Event]:
    """One event for the steps whose loss was NaN or infinite, none if there are none."""
    steps = train.steps[~np.isfinite(train["loss"])]
    if not len(steps):
        return []
    says = f"the loss of {len(steps):,} step{'s' * (len(steps) > 1)} was not finite, of step {steps[-1]:,} last"
    return [Event(int(steps[0]), "not finite", says)]

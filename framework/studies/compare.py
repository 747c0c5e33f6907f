"""Two runs side by side: what each step left behind on each rank, and the first thing that differs. Reads run folders.

What is compared stands in hashes.jsonl, samples.jsonl and metrics.jsonl. Times and memory are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.monitor.sinks import read_lines

HASHES = ("weights", "optimizer", "rng", "data")
COLUMNS = (*HASHES, "samples", "metrics")
METRICS = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "applied", "tokens", "samples", "consumed_samples")
HELD_OUT = "held-out loss"
EQUAL = "equal"

Cells = dict[tuple[int, int], Any]
"""(step, rank) -> what was found there."""


@dataclass(frozen=True)
class Trace:
    """What a run left behind; of a step that was done twice, the second time.

    columns  for each of COLUMNS: a hash, the sample ids by micro-batch, or the numbers of metrics.jsonl (as of rank 0)
    tensors  name of each tensor -> its hash
    """

    columns: Mapping[str, Cells]
    tensors: Cells


def read_trace(folder: Path) -> Trace:
    """The trace of a run in its folder; empty cells where nothing was written."""
    columns: dict[str, Cells] = {name: {} for name in COLUMNS}
    tensors: Cells = {}
    for line in read_lines(folder / "hashes.jsonl"):
        at = line["step"], line["rank"]
        for name in HASHES:
            columns[name][at] = line[name]
        tensors[at] = line.get("tensors", {})
    for line in read_lines(folder / "samples.jsonl"):
        columns["samples"].setdefault((line["step"], line["data_rank"]), {})[line["micro"]] = line["ids"]
    for line in read_lines(folder / "metrics.jsonl"):
        cell = columns["metrics"].setdefault((line["step"], 0), {})
        cell.update({name: line[name] for name in METRICS} if line["kind"] == "train" else {HELD_OUT: line["loss"]})
    return Trace(columns, tensors)


def compare(expected: Trace, found: Trace, steps: int, ranks: int) -> dict[str, str]:
    """Each column -> "equal", or the first difference in words: "differs at step 7, rank 1: master blocks.0.mlp.up.weight".

    Every step from 1 to `steps` must be there, in both, and in the hashes on each of `ranks` ranks.
    """
    wanted = {(step, rank) for step in range(1, steps + 1) for rank in range(ranks)}
    return {name: _first(name, expected, found, wanted if name in HASHES else {at for at in wanted if at[1] == 0}) for name in COLUMNS}


def _first(name: str, expected: Trace, found: Trace, wanted: set[tuple[int, int]]) -> str:
    ours, theirs = expected.columns[name], found.columns[name]
    for at in sorted({*wanted, *ours, *theirs}):
        step, rank = at
        for cells, which in ((ours, "the straight run"), (theirs, "this run")):
            if at not in cells:
                return f"step {step}, rank {rank} is missing in {which}"
        if not _same(ours[at], theirs[at]):
            detail = _details(name, expected, found, at)
            return f"differs at step {step}, rank {rank}{': ' if detail else ''}{detail}"
    return EQUAL


def _same(one: Any, other: Any) -> bool:
    """Bit for bit: floats print so that they read back exactly, and -0.0 is not 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _details(name: str, expected: Trace, found: Trace, at: tuple[int, int]) -> str:
    """What it is in the cell that differs."""
    ours, theirs = expected.columns[name][at], found.columns[name][at]
    if name in ("weights", "optimizer"):
        return _first_tensor(expected.tensors[at], found.tensors[at], live=name == "weights")
    if name == "metrics":
        return _first_key(ours, theirs, lambda key: f"{key} {theirs.get(key)} instead of {ours.get(key)}")
    if name == "samples":
        return _first_key(ours, theirs, lambda key: f"micro-batch {key} read {theirs.get(key)} instead of {ours.get(key)}")
    return ""


def _first_key(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], words: Callable[[Any], str]) -> str:
    keys: Iterable[Any] = {**ours, **theirs}
    return next(words(key) for key in keys if not _same(ours.get(key), theirs.get(key)))


def _first_tensor(ours: Mapping[str, str], theirs: Mapping[str, str], live: bool) -> str:
    """Name of the first tensor with another hash, among the weights that the forward pass reads (`live`) or the optimizer's."""
    names = [name for name in {**ours, **theirs} if name.startswith("live ") == live]
    if not names:
        return ""
    return next((name for name in names if ours.get(name) != theirs.get(name)), "a counter of the optimizer or the loss scaler")

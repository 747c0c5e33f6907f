"""Whole trainings on forked ranks, as `framework.train` starts them, in a second or two; and what they have written.

The ranks are forks of a server that has imported torch and deepspeed, and run the entry file's own code: words in, exit code out.
Each rank is a process with a writer process of its own, as under the launcher.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from framework.checkpoint.manifest import Manifest
from framework.launch import entry
from tests.ranks import run_ranks
from tests.starts import LAUNCHER_SETS, start

# The smallest model that has everything; one step takes a few milliseconds.
SMALL = ["recipe=tiny", "name=run", "batch.global_size=4", "batch.micro_size=1", "data=synthetic", "data.synthetic_tokens=5000"]
SMALL += ["data.seq_length=16", "data.workers=0", "eval.every=-1", "monitor.sample_tokens=0", "monitor.console=none"]
SMALL += ["monitor.curve=false", "launch.threads=1"]
SMALL += ["model.hidden_size=32", "model.num_heads=2", "model.ffn_hidden_size=64", "model.vocab_size=64", "schedule.total_steps=400"]
PLAIN = [*SMALL, "engine=plain", "zero=stage0", "batch.micro_size=4"]


@dataclass(frozen=True)
class Ended:
    """How a training ended on one rank: its exit code, and stdout and stderr together."""

    code: int
    text: str


def trained(rank: int, ranks: int, words: Sequence[str], cwd: str, prepare: Callable[[], None] | None = None) -> Ended:
    """A whole training in this process, in the folder `cwd`; `prepare` is called first."""
    os.chdir(cwd)
    if prepare is not None:
        prepare()
    from framework.train import train

    environment = {name: os.environ[name] for name in LAUNCHER_SETS} if ranks > 1 else {}
    with mock.patch.object(entry, "MANNERS_S", 0.0):  # no launcher ends the others here when the first has spoken
        started = start(words, environment, train)
    return Ended(started.code, started.text)


def train(
    words: Sequence[str], cwd: Path, ranks: int = 1, code: int = 0, prepare: Callable[[], None] | None = None, timeout: float = 240.0
) -> str:
    """Train with `words` and assert that every rank ends with `code`; what the ranks said."""
    ended = run_ranks(trained, ranks, list(words), str(cwd), prepare, timeout=timeout)
    text = "\n".join(one.text for one in ended)
    assert {one.code for one in ended} == {code}, text
    return text


# ---------------------------------------------------------------- what a run has written


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a killed process may have left half a line at the end."""
    if not path.exists():
        return []
    rows = path.read_text().split("\n")
    assert all(rows[:-1]), f"an empty line in {path}"
    return [json.loads(row) for row in rows[:-1]]


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm); the last line of a step holds."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines(run / "metrics.jsonl") if line["kind"] == "train"}


def hashes(run: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(step, rank) -> line of hashes.jsonl; the last line of a step holds."""
    return {(line["step"], line["rank"]): line for line in lines(run / "hashes.jsonl")}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of events.jsonl of one kind, oldest first."""
    return [line for line in lines(run / "events.jsonl") if line["event"] == kind]


def facts(run: Path) -> dict[str, Any]:
    """run.json."""
    return json.loads((run / "run.json").read_text())


# ---------------------------------------------------------------- checkpoints; whether one is whole is judged without framework/checkpoint


def manifest(folder: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint's folder."""
    return json.loads((folder / "manifest.json").read_text())


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a manifest and exactly the files that it names, each with its size and checksum.

    Marks of processes at work do not count: a save that was killed just before its end leaves one.
    """
    try:
        named = {file["name"]: file for file in manifest(folder)["files"]}
    except (FileNotFoundError, ValueError):
        return False
    there = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json" and path.suffix != ".writing"}
    sums = {name: (len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in there.items()}
    return sums == {name: (file["size"], file["xxh3_128"]) for name, file in named.items()}


def copy_as(folder: Path, step: int) -> Path:
    """A copy of a checkpoint's folder beside it, with everything as if it had been saved at `step`."""
    copy = folder.with_name(f"step_{step:08d}")
    shutil.copytree(folder, copy)
    old = Manifest.decode((copy / "manifest.json").read_bytes(), str(copy))
    small = {**old.small, "step": step, "consumed_samples": old.small["consumed_samples"] // old.step * step}
    (copy / "manifest.json").write_bytes(replace(old, step=step, small=small).encode())
    return copy


def whole_steps(checkpoints: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, lowest first."""
    return sorted(int(folder.name.removeprefix("step_")) for folder in checkpoints.glob("step_*") if is_whole(folder))


def same_steps(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether `one` holds exactly what `other` holds under the same keys, and something at all."""
    return bool(one) and all(other.get(key) == value for key, value in one.items())

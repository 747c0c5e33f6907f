"""What keeping State costs, on a model of 110M parameters and two ranks: `python -m tests.bench.checkpoint`.

Two parts. `costs`: one run, driven by hand, in which our saves and loads, a memcpy of the same bytes, plain reading,
DeepSpeed's save_checkpoint and torch's DCP async_save take turns (saves.py). `auto`: whole commands of a user, with
checkpoint.every=auto and without checkpoints, in the order A B B A A B. The figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import wide
from tests.bench.harness import heading, quartiles, watch
from tests.bench.overhead import RESULTS
from tests.bench.saves import STEPS_AFTER
from tests.ranks import Job, launch

THREADS = {"OMP_NUM_THREADS": "1"}


def costs(model: str, rounds: int) -> dict[str, Any]:
    """The report of saves.py."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder, "report.json")
        given = ["--model", model, "--folder", folder, "--rounds", str(rounds), "--report", str(report)]
        done = launch(["tests.bench.saves", *given], wide.RANKS, Path(folder), 600.0, THREADS)
        assert done.code == 0, f"saves ended with {done.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(report.read_text())


@dataclass(frozen=True)
class Timed:
    """One whole run: seconds of the command, seconds from its first finished step to its last, saves that it made, interval in steps."""

    command: float
    steps: float
    saves: int
    every: int | None


def timed_run(model: str, steps: int, mode: str, cache: Path) -> Timed:
    """Train with checkpoint.mode=`mode` and every=auto. Raises AssertionError if the run fails, or is late."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        words = ["framework.train", *wide.words(model, Path(folder), "run", steps), f"checkpoint={mode}", f"data.cache={cache}"]
        begun = time.monotonic()
        with Job(words, wide.RANKS, Path(folder), THREADS) as job:
            times = watch(Path(folder, "run", "metrics.jsonl"), steps, job.running, begun + 600)
            done = job.wait(600)
        assert done.code == 0, f"the run with checkpoint={mode} ended with {done.code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "checkpoint"]
    return Timed(done.seconds, times[-1] - times[0], len(saves), next((event["every"] for event in saves if "every" in event), None))


def auto(model: str, pairs: int, steps: int) -> list[tuple[Timed, Timed]]:
    """(with every=auto, without checkpoints) for each pair, after a short start that is not counted."""
    found: list[tuple[Timed, Timed]] = []
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        timed_run(model, 2, "none", Path(cache))
        for pair in range(pairs):
            order = ("async", "none") if pair % 2 == 0 else ("none", "async")
            run = {mode: timed_run(model, steps, mode, Path(cache)) for mode in order}
            found.append((run["async"], run["none"]))
    return found


def save_rows(report: dict[str, Any]) -> list[str]:
    """A row for each kind of save: the first of the process, the median of the others, and what the steps beside it lost."""
    cycles = report["cycles"]
    quiet = statistics.median(cycle["steps"] for cycle in cycles["none"][1:])
    rows = []
    for kind, label in (("async", "ours, async"), ("sync", "ours, sync"), ("deepspeed", "DeepSpeed"), ("dcp", "DCP async_save")):
        later = cycles[kind][1:]
        extra = statistics.median(cycle["steps"] for cycle in later) - quiet
        blocked = quartiles([cycle["blocked"] for cycle in later])
        nbytes = report["bytes"]["ours" if kind in ("async", "sync") else kind]
        rows.append(f"| {label} | {cycles[kind][0]['blocked']:.3f} | {blocked} | {extra:+.3f} | {nbytes / 1e6:.1f} |")
    return rows


def load_rows(report: dict[str, Any]) -> list[str]:
    """A row for each state of the page cache. The ratios are taken inside a round."""
    rows = []
    for cache, times in report["loads"].items():
        plain, load, resume = (quartiles(times[kind][1:]) for kind in ("plain", "load", "resume"))
        rows.append(f"| {cache} | {plain} | {load} | {resume} | {_ratio(times['load'][1:], times['plain'][1:]):.2f} |")
    return rows


def goal_rows(report: dict[str, Any], parameters: int) -> list[str]:
    """The figures that have a goal."""
    blocked = [cycle["blocked"] for cycle in report["cycles"]["async"][1:]]
    sync = [cycle["blocked"] for cycle in report["cycles"]["sync"][1:]]
    allowed = 12 * parameters + report["bytes"]["manifest"]
    return [
        f"| blocked by an async save / memcpy of the same bytes | {_ratio(blocked, report['memcpy']):.2f} | <= 3 |",
        f"| blocked by an async save / by a sync save | {_ratio(blocked, sync):.3f} | <= 0.10 |",
        f"| bytes written / (12 per parameter + manifest) | {report['bytes']['ours'] / allowed:.4f} | <= 1.02 |",
        *(
            f"| open, check and load / plain reading, file {cache} | {_ratio(times['load'][1:], times['plain'][1:]):.2f} | <= 1.5 |"
            for cache, times in report["loads"].items()
        ),
    ]


def auto_rows(pairs: Sequence[tuple[Timed, Timed]]) -> list[str]:
    """A row for the whole command, and one from the first finished step to the last (neither start nor last save in it)."""
    rows = []
    for label, name in (("whole command", "command"), ("first step to last", "steps")):
        a, b = ([getattr(timed, name) for timed in side] for side in zip(*pairs, strict=True))
        rows.append(f"| {label}, s | {statistics.median(a):.2f} | {statistics.median(b):.2f} | {_ratio(a, b):.3f} | <= 1.06 |")
    return rows


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of the ratios of neighbours in time."""
    return statistics.median(mine / other for mine, other in zip(a, b, strict=True))


def costs_text(report: dict[str, Any], model: str) -> str:
    parameters, memcpy = wide.parameters(model), quartiles(report["memcpy"])
    rounds = len(report["memcpy"])
    text = f"\nCheckpoints of {parameters:,} parameters, {wide.RANKS} ranks, ZeRO stage 1, fp32; {rounds} rounds after the first.\n\n"
    text += f"| save | first blocked, s | blocked, s | {STEPS_AFTER} steps after: extra s | MB |\n| --- | --- | --- | --- | --- |\n"
    text += "\n".join([*save_rows(report), f"| memcpy | | {memcpy} | | {12 * parameters / 1e6:.1f} |"])
    text += "\n\n| file is | plain reading, s | open, check, load, s | whole resume, s | load / plain |\n| --- | --- | --- | --- | --- |\n"
    text += "\n".join(load_rows(report))
    return text + "\n\n| what | figure | goal |\n| --- | --- | --- |\n" + "\n".join(goal_rows(report, parameters)) + "\n"


def auto_text(pairs: Sequence[tuple[Timed, Timed]], steps: int) -> str:
    saves = ", ".join(f"{ours.saves} (every {ours.every} steps)" for ours, _ in pairs)
    text = f"\ncheckpoint.every=auto against no checkpoints: {len(pairs)} pairs of {steps} steps; saves {saves}.\n\n"
    text += "| what | every=auto | none | ratio | goal |\n| --- | --- | --- | --- | --- |\n"
    return text + "\n".join(auto_rows(pairs)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("costs", "auto"), help="left out: both")
    parser.add_argument("--params", choices=list(wide.MODELS), default="110M")
    parser.add_argument("--rounds", type=int, default=3, help="saves and loads of each kind, after a first one; at least 2")
    parser.add_argument("--pairs", type=int, default=3, help="runs with every=auto and without checkpoints")
    parser.add_argument("--steps", type=int, default=40, help="steps of such a run")
    given = parser.parse_args()

    text = heading()
    if given.only != "auto":
        text += costs_text(costs(given.params, given.rounds), given.params)
    if given.only != "costs":
        text += auto_text(auto(given.params, given.pairs, given.steps), given.steps)
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()

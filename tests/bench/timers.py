"""What the timers of every step cost, and whether they are right: `python -m tests.bench.timers`.

Cost: one run in which they work in every second step (tests/bench/toggled.py), each step against its neighbour (goal: below 1 %; two
processes side by side would not do, the one that is started first is 5 % slower here). Right: their
parts against the step's time (goal 2 %), and the share of exposed communication against the trace of torch's profiler of the same
steps, in which it is the time of gloo's messages outside all operators of the training thread (goal 3 points). To RESULTS.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from framework.topology.traffic import covered
from tests.bench import workload
from tests.bench.harness import WARM_UP, Quartiles, heading, quartiles
from tests.ranks import Job
from tests.runs import lines

RESULTS = Path(__file__).with_name("RESULTS.md")
WINDOW = 8


def cost(steps: int, cache: Path) -> tuple[float, float, Quartiles]:
    """Median seconds of a step with and without timers, and the ratio inside pairs of neighbours."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = [f"output_root={folder}", "name=run", f"steps={WARM_UP + steps}", "eval.every=-1", "monitor.console=none", "checkpoint=none"]
        words = ["tests.bench.toggled", "zero=stage1", "data=synthetic", f"data.cache={cache}", *run, *workload.overrides(2)]
        job = Job(words, 2, Path(folder), {"OMP_NUM_THREADS": "1"})
        assert job.wait(900.0).code == 0, job.output()[1][-3000:]
        found = [line for line in lines(Path(folder, "run", "metrics.jsonl")) if line["kind"] == "train"][WARM_UP:]
    timed = {line["step"]: line["step_time_s"] for line in found if line["parts"]["forward"] > 0}
    bare = {line["step"]: line["step_time_s"] for line in found if line["parts"]["forward"] == 0}
    ratios = [seconds / bare[step + 1] for step, seconds in timed.items() if step + 1 in bare]
    ratios += [seconds / bare[step - 1] for step, seconds in timed.items() if step - 1 in bare]
    return statistics.median(timed.values()), statistics.median(bare.values()), quartiles(ratios)


def exposed_in_trace(path: Path) -> float:
    """Seconds in which messages were under way and the training thread ran no operator. Frames around operators, such as a node of
    autograd that holds a message, are none."""
    with gzip.open(path) as file:
        found = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    operators = [event for event in found if event.get("cat") == "cpu_op"]
    thread = statistics.mode(event["tid"] for event in operators)
    spans = {True: [], False: []}  # type: dict[bool, list[tuple[float, float]]]
    for event in found:
        message = event["name"].startswith("gloo:")
        if message or (event["tid"] == thread and event["name"].startswith("aten::")):
            spans[message].append((event["ts"], event["ts"] + event["dur"]))
    return (covered([*spans[True], *spans[False]]) - covered(spans[False])) / 1e6


def shares(words: list[str], cache: Path) -> tuple[float, float, float]:
    """Of one run on two ranks: share of communication by the timers, by the trace; the parts' largest distance from a step's time."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run = [f"output_root={folder}", "name=run", f"steps={WARM_UP + WINDOW + 2}", "eval.every=-1", "monitor.console=none"]
        look = ["profile=kernels", f"profile.first={WARM_UP}", f"profile.steps={WINDOW}", f"data.cache={cache}", "checkpoint=none"]
        job = Job(["framework.train", *run, *look, *words], 2, Path(folder), {"OMP_NUM_THREADS": "1"})
        assert job.wait(600.0).code == 0, job.output()[1][-3000:]
        steps: list[dict[str, Any]] = [line for line in lines(Path(folder, "run", "metrics.jsonl")) if line["kind"] == "train"]
        off = max(abs(sum(step["parts"].values()) / step["step_time_s"] - 1) for step in steps)
        seen = steps[WARM_UP - 1 : WARM_UP - 1 + WINDOW]
        whole = sum(step["step_time_s"] for step in seen)
        timed = sum(step["parts"]["communication"] for step in seen)
        return timed / whole, exposed_in_trace(Path(folder, "run", "profile", "trace_0.json.gz")) / whole, off


RUNS = {
    "zero 1": ["recipe=tiny", "zero=stage1"],
    "zero 3": ["recipe=tiny", "zero=stage3", "zero.persistence_threshold=0"],
    "tensor 2": ["recipe=tiny", "parallel=tensor2", "batch.micro_size=16"],
    "pipeline 2": ["recipe=tiny", "zero=stage1", "parallel=pipeline2", "batch.micro_size=4"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="measured steps, half of them without timers")
    given = parser.parse_args()
    text = heading() + "\n| what | timers | without, or by the trace | difference | goal |\n| --- | --- | --- | --- | --- |\n"
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        with_, without, ratio = cost(given.steps, Path(cache))
        text += f"| step of workload.py, s | {with_:.4f} | {without:.4f} | {ratio} | < 1.01 |\n"
        worst = 0.0
        for name, words in RUNS.items():
            timed, traced, off = shares(words, Path(cache))
            worst = max(worst, off)
            text += f"| communication, {name} | {timed:.1%} | {traced:.1%} | {100 * (timed - traced):+.1f} points | 3 points |\n"
        text += f"| parts against the step, the worst of all steps | | | {worst:.3%} | 2 % |\n"
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()

"""Two pipeline stages: what a measured cut gains, and the bubble against its formula: `python -m tests.bench.pipeline`.

The cut: a large vocabulary weighs on both ends of `parameters`, although the embedding costs next to no time and the head a
lot; `measured` gives the first stage more blocks (goal: ratio of step times < 1). The bubble: equal stages, 4, 8 and 16
micro-batches (goal: within 3 points of (p - 1) / (m + p - 1)). The figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.harness import Side, alternate, heading, quartiles
from tests.ranks import launch

RESULTS = Path(__file__).with_name("RESULTS.md")
MICROS = (4, 8, 16)
MODEL = ["model.hidden_size=192", "model.num_layers=8", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_hidden_size=512"]


def words(folder: Path, name: str, steps: int, micros: int) -> list[str]:
    """A run on two stages with nothing that is not training."""
    run = [f"output_root={folder}", f"name={name}", "resume=never", f"steps={steps}", "eval.every=-1", "monitor.curve=false"]
    data = ["data=synthetic", f"data.cache={folder}/cache", "data.seq_length=128", "data.workers=0"]
    batch = ["batch.micro_size=2", f"batch.global_size={2 * micros}"]
    return ["framework.train", "parallel=pipeline2", "zero=stage0", "precision=fp32", "checkpoint=none", "monitor.console=none",
            *run, *data, *batch, *MODEL]  # fmt: skip


def cut_by(method: str) -> Side:
    """A run with a vocabulary of 16,384, cut by `method`."""

    def command(folder: Path, steps: int) -> list[str]:
        return [*words(folder, "run", steps, 8), "model.vocab_size=16384", f"parallel.partition={method}"]

    return Side(method, 2, command, "run/metrics.jsonl")


def cuts(lives: int, steps: int) -> list[str]:
    """Rows: step time of both cuts, in turns, and the median ratio."""
    pairs = alternate(cut_by("measured"), cut_by("parameters"), lives, steps)
    rows = ["| cut | step, s: median (quartiles) |", "|---|---|"]
    for side, name in enumerate(("measured", "parameters")):
        rows.append(f"| {name} | {quartiles([pair[side].step for pair in pairs])} |")
    ratio = quartiles([mine.step / other.step for mine, other in pairs])
    return [*rows, f"| measured / parameters (goal < 1) | {ratio} |"]


def bubble(micros: int, lives: int) -> str:
    """A row: the bubble of the step that a run records, the middle one of a few runs."""
    events = sorted((recorded(micros) for _ in range(lives)), key=lambda event: event["bubble"])
    event = events[len(events) // 2]
    share, formula = 100 * event["bubble"], 100 * event["bubble_formula"]
    spread = f"{100 * events[0]['bubble']:.1f} to {100 * events[-1]['bubble']:.1f}"
    return f"| {micros} | {share:.1f} % ({spread}) | {formula:.1f} % | {share - formula:+.1f} | {event['backend_s']:.3f} |"


def recorded(micros: int) -> dict[str, Any]:
    """The event of one run."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [*words(Path(folder), "run", 6, micros), "parallel.partition=uniform"]
        done = launch(command, 2, Path(folder), 300, {"OMP_NUM_THREADS": "1"})
        assert done.code == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in Path(folder, "run/events.jsonl").read_text().splitlines()]
    (event,) = (line for line in lines if line["event"] == "pipeline")
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=3, help="0: the bubble alone")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    head = ["", "| micro-batches | bubble | formula | points apart (goal: within 3) | backend, s |", "|---|---|---|---|---|"]
    rows = [*cuts(given.lives, given.steps), *head] if given.lives else head
    table = "\n".join([heading(), *rows, *(bubble(micros, 3) for micros in MICROS)])
    print(table)
    with RESULTS.open("a") as results:
        results.write(f"\n{table}\n")


if __name__ == "__main__":
    main()

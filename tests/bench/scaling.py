"""How much of a second rank arrives, and where the rest goes: `python -m tests.bench.scaling`.

One process on one core against two, the same work for each rank (data, weak scaling) or the same work for both together (tensor,
pipeline, strong scaling), in turn. Efficiency is what two ranks train in a second over twice what one does. What is lost is told
apart by the run's own figures: ranks.jsonl has the parts of every rank, events.jsonl a pipeline's bubble. To RESULTS.md.

data            the slowest rank's wait for batches
communication   what even the rank with the least of it waits, without the bubble
bubble          of a pipeline, as recorded
recompute       what is computed a second time
imbalance       the slowest rank's work against the mean
own work        the mean rank's work against its share of one process's: memory that two cores share, smaller products
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import heading
from tests.ranks import Job
from tests.runs import lines

RESULTS = Path(__file__).with_name("RESULTS.md")
WINDOW = 10
COMMON = [
    "recipe=tiny", "eval.every=-1", "monitor.console=none", "monitor.sample_tokens=0", "checkpoint=none", "schedule.total_steps=300",
    "model.hidden_size=256", "model.ffn_hidden_size=768", "model.num_layers=4", f"alerts.window={WINDOW}", "launch.threads=1",
]  # fmt: skip
ONE = ["batch.global_size=16", "batch.micro_size=4", "zero=stage1"]


@dataclass(frozen=True)
class Layout:
    """`work` is what both ranks together train in a step, in the unit of one process's step."""

    words: list[str]
    work: float


LAYOUTS = {
    "data 2": Layout(["batch.global_size=32", "batch.micro_size=4", "zero=stage1"], 2.0),
    "data 2, zero 3": Layout(["batch.global_size=32", "batch.micro_size=4", "zero=stage3", "zero.persistence_threshold=0"], 2.0),
    "data 2, recompute": Layout(["batch.global_size=32", "batch.micro_size=4", "zero=stage1", "recompute=full"], 2.0),
    "tensor 2": Layout([*ONE, "parallel=tensor2"], 1.0),
    "pipeline 2": Layout([*ONE, "parallel=pipeline2", "parallel.partition=measured"], 1.0),
}


@dataclass(frozen=True)
class Figures:
    """Seconds of a step, medians over windows: of the slowest rank, or as tests/bench/scaling.py says above."""

    step: float
    work: float
    slowest_work: float
    data: float
    communication: float
    recompute: float
    bubble: float


def run(words: Sequence[str], ranks: int, steps: int, cache: Path) -> Figures:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = [*COMMON, f"output_root={folder}", "name=run", f"steps={steps}", f"data.cache={cache}", *words]
        job = Job(["framework.train", *given], ranks if ranks > 1 else None, Path(folder), {"OMP_NUM_THREADS": "1"})
        assert job.wait(600.0).code == 0, job.output()[1][-3000:]
        looks = lines(Path(folder, "run", "ranks.jsonl"))
        shares = [line["bubble"] for line in lines(Path(folder, "run", "events.jsonl")) if line["event"] == "pipeline"]

    def of(name: str, which: int) -> float:
        return statistics.median(look[name][which] for look in looks)

    step = of("step_s", 2)
    mean_work = (of("work_s", 0) + of("work_s", 2)) / 2  # of two ranks the least and the most
    return Figures(step, mean_work, of("work_s", 2), of("data_s", 2), of("communication_s", 0), of("recompute_s", 2),
                   step * shares[0] if shares else 0.0)  # fmt: skip


def row(name: str, layout: Layout, one: Figures, two: Figures) -> str:
    """Shares of the step of two ranks; they add up to what is lost, but for medians that are taken apart."""
    ideal = one.step * layout.work / 2
    own = two.work - two.recompute - (one.work - one.recompute) * layout.work / 2
    lost = {
        "data": two.data,
        "communication": max(0.0, two.communication - two.bubble),
        "bubble": two.bubble,
        "recompute": two.recompute,
        "imbalance": two.slowest_work - two.work,
        "own work": own,
    }
    cells = " | ".join(f"{seconds / two.step:+.1%}" for seconds in lost.values())
    rest = two.step - ideal - sum(lost.values())
    return f"| {name} | {one.step:.3f} | {two.step:.3f} | **{ideal / two.step:.1%}** | {cells} | {rest / two.step:+.1%} |"


def middle(found: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(values) for values in zip(*(vars(one).values() for one in found), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout, in turn")
    parser.add_argument("--steps", type=int, default=42, help="steps of a run")
    given = parser.parse_args()
    ones: list[Figures] = []
    twos: dict[str, list[Figures]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        run(ONE, 1, 12, Path(cache))  # builds the corpus; not counted
        for _ in range(given.rounds):
            ones.append(run(ONE, 1, given.steps, Path(cache)))
            for name, layout in LAYOUTS.items():
                twos[name].append(run(layout.words, 2, given.steps, Path(cache)))
    head = "data | communication | bubble | recompute | imbalance | own work | rest"
    text = heading() + f"\nShares of the step of two ranks, medians of {given.rounds} runs of {given.steps} steps each, in turn.\n\n"
    text += f"| layout | one, s | two, s | efficiency | {head} |\n|{' --- |' * 11}\n"
    text += "\n".join(row(name, layout, middle(ones), middle(twos[name])) for name, layout in LAYOUTS.items()) + "\n"
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()

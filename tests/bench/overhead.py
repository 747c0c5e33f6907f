"""What our loop costs over the bare one, on the same 10M-parameter model: `python -m tests.bench.overhead`.

Two ranks against a bare DeepSpeed loop (goal: ratio of step times <= 1.03, first finished step at most 2 s later), one
process against a bare torch loop (goal <= 1.05). The figures are appended to RESULTS.md. `--only noise` compares the bare
DeepSpeed loop with itself: a difference smaller than what it shows is none.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import workload
from tests.bench.harness import WARM_UP, Block, Side, alternate, heading, quartiles

RESULTS = Path(__file__).with_name("RESULTS.md")


def ours(ranks: int | None, cache: Path) -> Side:
    """The command of a user, with what a user would have: metrics, console, loader processes. `cache` keeps the built corpus.

    Without saves, which the floor does not make either: what they cost, checkpoint.py measures.
    """
    zero = "stage0" if ranks is None else "stage1"

    def words(folder: Path, steps: int) -> list[str]:
        run = [f"output_root={folder}", "name=ours", "resume=never", f"steps={steps}", "eval.every=-1", "monitor.curve=false"]
        groups = [f"zero={zero}", "precision=fp32", "data=synthetic", f"data.cache={cache}", "checkpoint=none"]
        return ["framework.train", *groups, *run, *workload.overrides(ranks or 1)]

    return Side("ours", ranks, words, "ours/metrics.jsonl")


def bare(module: str, ranks: int | None) -> Side:
    def words(folder: Path, steps: int) -> list[str]:
        return [f"tests.bench.{module}", "--steps", str(steps), "--lines", str(folder / "lines")]

    return Side(module, ranks, words, "lines")


@dataclass(frozen=True)
class Comparison:
    """Ours against a floor. `goal` is for the ratio of step times, `later_goal` for how much later our first step is finished."""

    a: Side
    b: Side
    goal: str
    later_goal: str


def comparisons(cache: Path) -> dict[str, Comparison]:
    return {
        "two_ranks": Comparison(ours(2, cache), bare("bare_deepspeed", 2), "<= 1.03", "<= +2 s"),
        "one_process": Comparison(ours(None, cache), bare("bare_torch", None), "<= 1.05", "none"),
        "noise": Comparison(bare("bare_deepspeed", 2), bare("bare_deepspeed", 2), "1", "0 s"),
    }


def rows(name: str, comparison: Comparison, pairs: Sequence[tuple[Block, Block]]) -> list[str]:
    """One table row per figure. The ratio is taken inside a pair of neighbouring turns, then median and quartiles over pairs."""
    step_a, step_b = (statistics.median(block.step for block in side) for side in zip(*pairs, strict=True))
    first_a, first_b = (statistics.median(block.first_step for block in side) for side in zip(*pairs, strict=True))
    ratio = quartiles([ours.step / floor.step for ours, floor in pairs])
    head = f"| {name} | {comparison.a.name} / {comparison.b.name}"
    return [
        f"{head} | step, s | {step_a:.3f} | {step_b:.3f} | {ratio} | {comparison.goal} |",
        f"{head} | command to first step, s | {first_a:.2f} | {first_b:.2f} | {first_a - first_b:+.2f} s | {comparison.later_goal} |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("two_ranks", "one_process", "noise"), help="left out: two_ranks and one_process")
    parser.add_argument("--lives", type=int, default=5, help="starts of each side (at least 5 for a figure that is quoted)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a turn")
    given = parser.parse_args()

    text = heading() + (
        f"\n{given.lives} starts of each side, {WARM_UP} steps of warm-up, then turns of {given.steps} steps in the order A B B A.\n\n"
        "| comparison | A / B | what | A | B | A against B | goal |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        known = comparisons(Path(cache))
        for name in [given.only] if given.only else ["two_ranks", "one_process"]:
            pairs = alternate(known[name].a, known[name].b, given.lives, given.steps)
            text += "\n".join(rows(name, known[name], pairs)) + "\n"
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()

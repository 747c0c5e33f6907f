"""The Ledger's books, predicted and measured: `python -m tests.bench.ledger`.

Bytes, not times: the table is the same on every CPU. Static books are of engines on gloo ranks, the worst rank counts; activations and
the peak are of a plain model, four blocks of width 64. Appended to RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from framework.planner.ledger import STATIC
from tests.bench.harness import heading
from tests.bench.pipeline import RESULTS
from tests.engine.tiny import ONE_THREAD
from tests.planner.books import CHOICES, beside, config_of, measure
from tests.planner.test_activations import PRECISIONS, SHAPES
from tests.planner.test_static_books import CASES, live_and_paper
from tests.ranks import run_ranks


def static_rows() -> Iterator[str]:
    for form, spread, model, optimizer in CASES:
        config = spread.config(form, model, optimizer, 1.0)
        ranks = run_ranks(live_and_paper, spread.grid.size, config, spread, timeout=120, env=ONE_THREAD)
        off = max(abs(paper[book] - live[book]) for live, paper in ranks for book in STATIC)
        paper = max((paper for _, paper in ranks), key=lambda books: sum(books.values()))
        yield f"| {form} | {spread} | {' | '.join(f'{paper[book]:,}' for book in STATIC)} | {off} |"


def moving_rows() -> Iterator[str]:
    for shape, model in SHAPES.items():
        for precision in PRECISIONS:
            for name, choice in CHOICES.items():
                found = measure(config_of(replace(model), PRECISIONS[precision], choice, 2, 64))
                paper, live = found.paper.device["activations"], found.activations
                peak = found.peak + beside(found.paper)
                yield (
                    f"| {shape} | {precision} | {name} | {paper:,} | {live:,} | {paper / live - 1:+.1%} "
                    f"| {found.paper.peak:,} | {peak:,} | {found.paper.peak / peak - 1:+.1%} |"
                )


def main() -> None:
    table = "\n".join([
        heading(),
        "Static books, bytes on the fullest rank; layouts are data x tensor (s: sliced sequence) x pipeline x context.\n",
        f"| precision, stage | layout | {' | '.join(STATIC)} | off by (goal 0) |",
        f"|---|---|{'---|' * (len(STATIC) + 1)}",
        *static_rows(),
        "\nActivations (goal: within 5 %) and the peak (within 10 %), bytes.\n",
        "| shape | precision | recompute | predicted | live | error | peak predicted | peak live | error |",
        "|---|---|---|---|---|---|---|---|---|",
        *moving_rows(),
    ])  # fmt: skip
    print(table)
    with RESULTS.open("a") as results:
        results.write(f"\n{table}\n")


if __name__ == "__main__":
    main()

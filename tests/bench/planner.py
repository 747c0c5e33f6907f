"""What the planner is worth: `python -m tests.bench.planner`. How fast it answers, and whether its first choice is the fastest.

Answers are whole commands in fresh processes beside an empty Hydra app, in turns. For the choice, `recipe=tiny` is really run on two
ranks of this machine in every layout that fits: each way to spread model and state at its best micro-batch on paper, and the first
way at some other micro-batches and recompute; all in turn, and again. The figures are appended to RESULTS.md.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from framework.config.compose import ROOT, compose
from framework.config.schema import Config
from framework.planner.hardware import Site, named
from framework.planner.search import Found, Search, describe
from framework.studies.probe import measure
from tests.bench.harness import heading
from tests.bench.overhead import RESULTS

RANKS, ROUNDS = 2, 7
EMPTY = "import hydra\nhydra.main(version_base='1.3', config_path=None)(lambda config: None)()\n"
PLAN = ["-m", "framework.plan", "recipe=llama2_70b", "plan.world_size=128", "plan.hardware=h100_80gb"]
FIRST = 6
"""Layouts of the way that is first on paper that are tried beside its best one."""


def command_seconds(words: Sequence[str]) -> tuple[float, float]:
    """Of `python WORDS`: from its start to its end, and of a processor, which other load leaves alone."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answers() -> str:
    """Rows about the time to answer: medians over rounds in turns."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        app = Path(folder, "app.py")
        app.write_text(EMPTY)
        quiet = [str(app), "hydra.output_subdir=null", f"hydra.run.dir={folder}", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        pairs = [(command_seconds(PLAN), command_seconds(quiet)) for _ in range(ROUNDS)]
    text = ""
    for clock, name in enumerate(("s", "s of a processor")):
        plan, empty = (statistics.median(side[clock] for side in sides) for sides in zip(*pairs, strict=True))
        over = statistics.median(ours[clock] - theirs[clock] for ours, theirs in pairs)
        text += f"| framework.plan recipe=llama2_70b, 128 ranks, {name} | {plan:.2f} | < 2 |\n"
        text += f"| the same, more than an empty Hydra app ({empty:.2f}), {name} | {over:+.2f} | <= +0.3 |\n"
    begun, of_processor = time.perf_counter(), time.process_time()
    findings = Search(compose(["recipe=llama2_70b"]), 128, Site(named("h100_80gb"), 8)).run()
    took, of_processor = time.perf_counter() - begun, time.process_time() - of_processor
    text += f"| search over {findings.layouts:,} layouts, of which {len(findings.found):,} fit, s | {took:.2f} | < 5 |\n"
    return text + f"| the same, s of a processor | {of_processor:.2f} | < 5 |\n"


def chosen(found: Sequence[Found]) -> list[Found]:
    """What to run: of each way (axes, ZeRO, offload) the best on paper; of the first way the FIRST next ones too."""
    ways: dict[object, Found] = {}
    for each in found:
        layout = each.layout
        ways.setdefault((layout.grid, layout.sequence, layout.stage, layout.offload), each)
    first = found[0].layout
    same = [each for each in found if replace(each.layout, micro=first.micro, recompute=first.recompute) == first]
    return [*ways.values(), *same[1 : FIRST + 1]]


def choice(config: Config, rounds: int, tell: Callable[[str], None]) -> str:
    """The table of layouts, as estimated and as measured, and the row about the first choice."""
    tried = chosen(Search(config, RANKS, Site(named("auto"), RANKS)).run().found)

    took: list[list[float]] = [[] for _ in tried]
    for _ in range(rounds):  # all of them in turn: what else the machine does changes from minute to minute
        for number, each in enumerate(tried):
            took[number].append(measure(each.layout.of(config), RANKS, f"layout_{number}"))
            tell(f"{took[number][-1]:.4f} s measured, {each.seconds:.4f} s on paper: {describe(each.layout)}")
    rows = "".join(
        f"| {describe(each.layout)} | {each.seconds:.4f} | {', '.join(f'{one:.4f}' for one in times)} |\n"
        for each, times in sorted(zip(tried, took, strict=True), key=lambda pair: statistics.median(pair[1]))
    )
    first, best = statistics.median(took[0]), min(statistics.median(times) for times in took)
    spread = max(took[0]) / min(took[0])
    verdict = f"| first choice / fastest of {len(tried)} measured | {first / best:.3f} | <= 1.10, or the spread |\n"
    verdict += f"| slowest / fastest of {rounds} runs of the first choice: the spread | {spread:.3f} | |\n"
    return f"{verdict}\n| layout of recipe=tiny on {RANKS} ranks | on paper, s | measured, s |\n| --- | --- | --- |\n{rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("answers", "choice"), help="left out: both")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout")
    given = parser.parse_args()
    text = heading() + "\nThe planner.\n\n| what | figure | goal |\n| --- | --- | --- |\n"
    text += answers() if given.only != "choice" else ""
    if given.only != "answers":
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            config = compose(["recipe=tiny", f"output_root={folder}", f"data.cache={ROOT / 'runs' / '.data'}"])
            text += choice(config, given.rounds, lambda line: sys.stderr.write(line + "\n"))
    print(text)
    with RESULTS.open("a") as file:
        file.write("\n" + text)


if __name__ == "__main__":
    main()

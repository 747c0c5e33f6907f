"""A side that only ticks, for the test of the harness: `python -m tests.bench.clock --steps 25 --ticks FILE --lines FILE`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.bench.workload import StepLines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ticks", type=Path, required=True, help="when each step was done; appended to")
    parser.add_argument("--lines", type=Path, required=True)
    given = parser.parse_args()

    lines = StepLines(given.lines)
    with given.ticks.open("a", buffering=1) as ticks:
        for step in range(1, given.steps + 1):
            time.sleep(0.02)
            ticks.write(f"{time.monotonic()}\n")
            lines.step(step, 0.0)


if __name__ == "__main__":
    main()

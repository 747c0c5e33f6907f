"""framework.train without its timers, for tests/bench/timers.py: `python -m tests.bench.untimed recipe=...`."""

from __future__ import annotations

import sys

from framework import train


def main() -> int:
    from framework.topology import timers, traffic

    timers.Timers.enter = lambda self, name: name  # type: ignore[method-assign]
    timers.Timers.leave = lambda self, before: None  # type: ignore[method-assign]
    traffic.Traffic.watch = lambda self: None  # type: ignore[method-assign]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())

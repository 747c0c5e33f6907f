"""framework.train whose timers work in every second step only, for tests/bench/timers.py: `python -m tests.bench.toggled recipe=...`.

In the other steps moments are not noted and collectives are not watched; the step's own clock goes on. Neighbouring steps of one run
share everything else: the machine's load, the place of its memory, the data's shape.
"""

from __future__ import annotations

import sys
from typing import Any

from framework import train


def main() -> int:
    from framework.topology.timers import Timers
    from framework.topology.traffic import Traffic
    from framework.trainer.run import Clock

    enter, leave, lap = Timers.enter, Timers.leave, Clock.lap
    watched: list[Traffic] = []
    begin = Traffic.watch

    def watch(self: Traffic) -> None:
        watched.append(self)
        begin(self)

    def silent(self: Any, name: str) -> str:
        return name

    def toggled(self: Clock) -> Any:
        taken = lap(self)
        on = Timers.enter is enter
        Timers.enter, Timers.leave = (silent, silent) if on else (enter, leave)  # type: ignore[method-assign, assignment]
        watched[0].end() if on else begin(watched[0])
        return taken

    Traffic.watch, Clock.lap = watch, toggled  # type: ignore[method-assign]
    return train.main()


if __name__ == "__main__":
    sys.exit(main())

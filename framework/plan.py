"""Plan a run before it starts: `python -m framework.plan recipe=tiny plan.world_size=2`. Memory, time, advice; `plan.search=true`.

The entry file: compose, check, call the study. No torch unless `plan.build` asks for a model.
"""

from __future__ import annotations

import signal
import sys

from framework.config.schema import Config
from framework.launch.command import Places
from framework.launch.entry import Entry, run_entry
from framework.launch.start import planned, planned_now
from framework.planner.hardware import named


def devices(config: Config) -> int | None:
    """Of a host of plan.hardware; a CPU takes all ranks. Raises ConfigError for a name that is not in the table."""
    hardware = named(config.plan.hardware)
    return None if hardware.shared else hardware.host.devices


def ranks(config: Config, *_: object) -> Places:
    """Where the settings must be right."""
    return planned_now(config, devices(config))


def plan(entry: Entry) -> None:
    """Say it once, however many ranks ask."""
    from framework.studies.planned import Study

    if entry.process.first:
        there = planned(entry.config, devices(entry.config))
        sys.stdout.write(Study(entry.config, there).run() + "\n")


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # through every `finally`: no rank outlives its probe
    return run_entry(sys.argv[1:], plan, ranks)


if __name__ == "__main__":
    sys.exit(main())

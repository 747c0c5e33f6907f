"""Prove exact resume: `python -m framework.verify recipe=tiny`. Straight runs against killed ones, in fresh processes.

The entry file: compose, check, call the study. Exit code 0 only if every run is equal, 2 if the settings are refused.
"""

from __future__ import annotations

import signal
import sys

from rich.console import Console

from framework.config.schema import Config
from framework.launch.command import Places, ranks_to_start
from framework.launch.entry import run_entry
from framework.studies.verify import verify

FILE_WIDTH = 120
"""Columns of the table where there is no terminal to ask; the 80 of rich would break the names of the cases."""


def ranks(config: Config, *_: object) -> Places:
    """All on this host."""
    number = ranks_to_start(config)
    return Places(number, number)


def main() -> int:
    words = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # through every `finally`: no run outlives its proof
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    return run_entry(words, lambda entry: verify(entry.config, words, screen), ranks)


if __name__ == "__main__":
    sys.exit(main())

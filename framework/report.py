"""A run as one page that opens without a network: `python -m framework.report run=runs/NAME [against=runs/OTHER]`.

The entry file: compose, check, call the study. No torch: a run folder that was copied to a laptop is enough.
"""

from __future__ import annotations

import sys

from framework.launch.entry import Entry, run_entry


def report(entry: Entry) -> None:
    """Write the page once, however many ranks ask, and say where it lies."""
    from framework.studies import report as study

    if entry.process.first:
        sys.stdout.write(f"{study.report(entry.config)}\n")


def main() -> int:
    return run_entry(sys.argv[1:], report)


if __name__ == "__main__":
    sys.exit(main())

"""Perplexity of a run on held-out tokens: `python -m framework.evaluate run=runs/NAME [data.files=[PATH]]`.

The entry file: compose, check, call the study. One process.
"""

from __future__ import annotations

import contextlib
import sys

from framework.base.errors import ConfigError
from framework.launch.entry import Entry, run_entry


def evaluate(entry: Entry) -> None:
    """Say how well the run's newest checkpoint predicts."""
    if entry.process.ranks > 1:
        raise ConfigError("framework.evaluate", f"{entry.process.ranks} ranks", "one process", "python -m framework.evaluate run=DIR")
    with contextlib.redirect_stdout(entry.log):  # DeepSpeed's logger keeps the stdout of its import
        from framework.studies import evaluate as study
    sys.stdout.write(f"{entry.config.run}: {study.evaluate(entry.config).says()}\n")


def main() -> int:
    words = sys.argv[1:]
    if any(word.startswith("data.files=") for word in words) and not any(word.startswith("data=") for word in words):
        words = ["data=tokens", *words]  # what else could they be
    return run_entry(words, evaluate)


if __name__ == "__main__":
    sys.exit(main())

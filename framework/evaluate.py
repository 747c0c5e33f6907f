"""How good a run is: `python -m framework.evaluate run=runs/NAME [data.files=[PATH]]`, perplexity on held-out tokens, or with
`evaluate.tasks=[NAMES]` tasks of lm-evaluation-harness.

The entry file: compose, check, call the study. One process.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from framework.base.errors import ConfigError
from framework.base.files import write_json
from framework.launch.entry import Entry, run_entry


def evaluate(entry: Entry) -> None:
    """Say what the run's newest checkpoint can do."""
    config = entry.config
    if entry.process.ranks > 1:
        raise ConfigError("framework.evaluate", f"{entry.process.ranks} ranks", "one process", "python -m framework.evaluate run=DIR")
    with contextlib.redirect_stdout(entry.log):  # DeepSpeed's logger keeps the stdout of its import
        from framework.studies import evaluate as perplexity
        from framework.studies import tasks

        found = tasks.answer(config) if config.evaluate.tasks else perplexity.evaluate(config)
    sys.stdout.write(f"{config.run}: {found.says()}\n")
    if config.evaluate.out:
        write_json(Path(config.evaluate.out), {"run": config.run, **found.numbers()})


def main() -> int:
    words = sys.argv[1:]
    if any(word.startswith("data.files=") for word in words) and not any(word.startswith("data=") for word in words):
        words = ["data=tokens", *words]  # what else could they be
    return run_entry(words, evaluate)


if __name__ == "__main__":
    sys.exit(main())

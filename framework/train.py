"""Train a model from a recipe: `deepspeed --num_gpus 2 --module framework.train recipe=tiny`, or `python -m framework.train ...`.

The entry file: compose, check, call the trainer. Nothing heavy is imported before the settings have been accepted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from framework.base.errors import Stopped
from framework.launch.entry import Entry, run_entry
from framework.launch.start import ranks_of, refuse_inside, starts_ranks

FILE_WIDTH = 140
AGAIN = "the same command again, to go on"


def train(entry: Entry) -> int | None:
    """Build the run that the settings describe and drive it to its last step; or start the ranks that do."""
    if starts_ranks(entry.config.launch, entry.process, entry.frozen):
        from framework.studies.supervise import start

        return start(entry.config, sys.argv[1:])
    if entry.process.launched and not entry.frozen:
        refuse_inside(entry.config, entry.process)
    with contextlib.redirect_stdout(entry.log):  # DeepSpeed's logger keeps the stdout of its import
        from framework.trainer.build import build, finished
        from framework.trainer.loop import train as drive
    if finished(entry.config, entry.process):
        return None
    run = build(entry.config, entry.process, entry.log)
    with run.explained():
        status = drive(run)
    if status == "stopped":
        raise Stopped(entry.config.run_dir, f"stopped after step {run.position.step} of {entry.config.steps}, as asked", write=AGAIN)
    return None


def sweep(words: Sequence[str], extra: Path | None) -> int:
    """Each job of `-m` as a launch of its own."""
    from rich.console import Console

    from framework.launch.hydra_plugin import multirun
    from framework.studies.sweep import Sweep

    width = None if sys.stdout.isatty() else FILE_WIDTH
    with Sweep(Console(highlight=False, width=width), extra) as jobs:
        multirun(words, jobs.run)
        return jobs.close()


def main() -> int:
    return run_entry(sys.argv[1:], train, ranks_of, sweep)


if __name__ == "__main__":
    sys.exit(main())

"""Train a model from a recipe: `deepspeed --num_gpus 2 --module framework.train recipe=tiny`, or `python -m framework.train ...`.

The entry file: compose, check, call the trainer. Nothing heavy is imported before the settings have been accepted.
"""

from __future__ import annotations

import contextlib
import sys

from framework.launch.entry import Entry, run_entry


def train(entry: Entry) -> None:
    """Build the run that the settings describe and drive it to its last step."""
    with contextlib.redirect_stdout(entry.log):  # DeepSpeed's logger keeps the stdout of its import
        from framework.trainer.build import build, finished
        from framework.trainer.loop import train as drive
    if finished(entry.config, entry.process):
        return
    drive(build(entry.config, entry.process, entry.log))


def main() -> int:
    return run_entry(sys.argv[1:], train)


if __name__ == "__main__":
    sys.exit(main())

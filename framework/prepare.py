"""Texts to a token file: `python -m framework.prepare data=text data.files=[GLOBS] data.tokenizer=PATH prepare.out=PATH`.

The entry file: compose, check, call the room that does it. No torch.
"""

from __future__ import annotations

import os
import sys

from framework.base.errors import ConfigError
from framework.launch.entry import Entry, run_entry
from framework.launch.environment import default_threads


def prepare(entry: Entry) -> None:
    """Make the token file once, however many ranks ask, and say what came of it."""
    from rich.console import Console

    from framework.data import pace, preparing

    config = entry.config
    if config.data.kind != "text":
        raise ConfigError("data.kind", config.data.kind, "text", "data=text data.files=[PATH]")
    if not entry.process.first:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each of our processes is one thread; the library would start one per core in each
    with pace.Pace(config.monitor.console, Console(stderr=True)).shown() as shown:
        workers = config.prepare.workers or default_threads(1)
        made = preparing.prepare(config.data, config.prepare, workers, shown.tell)
    sys.stdout.write(pace.summary(made) + "\n")


def main() -> int:
    return run_entry(sys.argv[1:], prepare)


if __name__ == "__main__":
    sys.exit(main())

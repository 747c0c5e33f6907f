"""Make something else of a run: `python -m framework.convert run=runs/NAME convert.to=weights convert.out=DIR convert.dtype=bf16`.

weights: the model alone, whole tensors by name in safetensors files, from the newest complete checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

from framework.base.errors import ConfigError, RunError
from framework.launch.entry import Entry, run_entry


def convert(entry: Entry) -> None:
    """Do what the settings `run` and `convert` say; every number of ranks does it once."""
    from framework.checkpoint.export import export_weights
    from framework.checkpoint.state import NAMES
    from framework.checkpoint.store import Store, find
    from framework.trainer.folder import read_config
    from framework.trainer.letters import letters

    run, settings = entry.config.run, entry.config.convert
    if not run:
        raise ConfigError("run", "nothing", "a run folder, or one of its checkpoints", "run=runs/NAME")
    if not settings.out or Path(settings.out).exists():
        got = f"{settings.out}, which exists" if settings.out else "nothing"
        raise ConfigError("convert.out", got, "the name of a new folder", "convert.out=DIR")
    if not entry.process.first:
        return
    with letters(ConfigError):
        kept = Path(run, "config.yaml")
        place = find(read_config(kept).checkpoint.root or run) if kept.exists() else find(run)
        if place is None:
            raise ConfigError("run", run, "a run folder, or one of its checkpoints", "run=runs/NAME")
        store = Store(place[0])
        checkpoint = store.open(place[1])
        store.verify(checkpoint)
    with letters(RunError):
        nbytes = export_weights(checkpoint, Path(settings.out), NAMES[settings.dtype])
    sys.stdout.write(f"{settings.out}: the weights of step {checkpoint.step}, {nbytes} bytes in {settings.dtype}\n")


def main() -> int:
    return run_entry(sys.argv[1:], convert)


if __name__ == "__main__":
    sys.exit(main())

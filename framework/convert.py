"""Make something else of a run: `python -m framework.convert run=runs/NAME to=hf out=DIR dtype=bf16`, from its newest complete checkpoint.

weights: the model alone, whole tensors by name in safetensors files. hf: a folder that transformers loads. The words to, out and dtype
are short for convert.to and so on. `from=hf model=hf model.init_from=DIR` looks whether such a folder can be trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

from framework.base.errors import ConfigError, RunError
from framework.launch.entry import Entry, run_entry

SHORT = ("to", "out", "dtype")
LOOK = "from=hf"


def convert(entry: Entry) -> None:
    """Do what the settings `run` and `convert` say; every number of ranks does it once."""
    from framework.checkpoint.store import Store, find
    from framework.studies.published import convert_checkpoint
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
        sys.stdout.write(convert_checkpoint(checkpoint, Path(run), settings) + "\n")


def look(entry: Entry) -> None:
    """Say what the folder model.init_from holds; refuse what cannot be trained."""
    from framework.studies.published import look_at

    sys.stdout.write(look_at(entry.config.model) + "\n")


def main() -> int:
    words = [f"convert.{word}" if word.partition("=")[0] in SHORT else word for word in sys.argv[1:] if word != LOOK]
    return run_entry(words, look if LOOK in sys.argv[1:] else convert)


if __name__ == "__main__":
    sys.exit(main())

"""The run folder: whose it is, and what may be done with it. Looked at before the ranks meet, claimed by the first rank."""

from __future__ import annotations

from pathlib import Path

import yaml

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.config.compose import build, to_dict
from framework.config.identity import changes
from framework.config.schema import Config
from framework.monitor.runfile import RunFile


def inspect(config: Config) -> bool:
    """True if the run in config's folder is done already. Reads only; every rank sees the same.

    Raises ConfigError if the folder holds a run of another meaning, or something that is no run.
    """
    folder = Path(config.run_dir)
    kept = folder / "config.yaml"
    if config.resume == "never" or not folder.exists() or not any(p.name != "logs" for p in folder.iterdir()):
        return False
    if not kept.exists():
        raise ConfigError("name", f"{folder}, a folder that is no run", "a run folder, or a free name", f"name=ANOTHER, or move {folder}")
    other = [change for change in changes(read_config(kept), config) if change.tag == "meaning"]
    if other:
        listed = "; ".join(f"{c.key}: {c.old} there, {c.new} now" for c in other)
        write = "name=ANOTHER, or resume=never to keep the old run beside the new"
        raise ConfigError("name", f"{folder}, the run of another config ({listed})", "the same settings", write)
    return RunFile(folder / "run.json").status == "done" and read_config(kept).steps >= config.steps


def claim(config: Config) -> Path:
    """Make the run folder, on the first rank: a used one is kept as NAME.old-k where resume=never."""
    folder = Path(config.run_dir)
    if config.resume == "never" and (folder / "config.yaml").exists():
        number = 1
        while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(old)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs" / "letter.txt").unlink(missing_ok=True)
    write_atomic(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False).encode())
    return folder


def read_config(path: Path) -> Config:
    """The Config that a run folder's config.yaml holds."""
    return build(Config, yaml.safe_load(path.read_text()))

"""The run folder: whose it is, and what may be done with it. Looked at before the ranks meet, claimed by the first rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.config.compose import build, to_dict
from framework.config.identity import changes, refuse_changes
from framework.config.schema import Config
from framework.monitor.runfile import RunFile
from framework.topology.groups import Groups
from framework.trainer import lock, memory_tier

CARRIED = "hf"
"""Folder in a run's: small files of the Hugging Face folder that training began from."""
CARRIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def inspect(config: Config) -> bool:
    """True if the run in config's folder is done already. Reads only; every rank sees the same.

    Raises ConfigError if the folder holds a run of another meaning, or something that is no run.
    """
    folder = run_folder(config)
    kept = folder / "config.yaml"
    if not folder.exists() or not any(p.name not in ("logs", lock.NAME) for p in folder.iterdir()):
        return False
    if not kept.exists():
        raise ConfigError("name", f"{folder}, a folder that is no run", "a run folder, or a free name", f"name=ANOTHER, or move {folder}")
    if config.resume == "never":
        return False
    refuse_changes(changes(read_config(kept), config), config, str(folder))
    made = RunFile(folder / "run.json")  # not config.yaml, which a start that was refused later has written anew
    return made.status == "done" and made.steps >= config.steps


def run_folder(config: Config) -> Path:
    """The folder of the config's run."""
    return Path(config.run_dir)


def claim(config: Config) -> Path:
    """Make the run folder, on the first rank: a used one is kept as NAME.old-k where resume=never.

    Raises ConfigError if another live run holds it.
    """
    folder = run_folder(config)
    lock.refuse_living(folder)
    if config.resume == "never" and (folder / "config.yaml").exists():
        number = 1
        while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(old)
    if config.resume == "never":
        memory_tier.remove(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    (folder / "logs" / "letter.txt").unlink(missing_ok=True)
    write_atomic(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False).encode())
    _carry(config.model.init_from, folder / CARRIED)
    return folder


def _carry(source: str | None, target: Path) -> None:
    """Copy what an exported model will need beside its weights; once, for the folder may be gone at a later start."""
    if source and not target.exists():
        found = [path for name in CARRIED_FILES if (path := Path(source, name)).is_file()]
        for path in found:
            write_atomic(target / path.name, path.read_bytes())


def read_config(path: Path) -> Config:
    """The Config that a run folder's config.yaml holds."""
    return build(Config, yaml.safe_load(path.read_text()))


def resolved(config: Config, groups: Groups, key: str) -> Any:
    """What an earlier start of the run has chosen for an `auto`, the same on every rank; None if it has not."""
    return groups.gather(RunFile(run_folder(config) / "run.json").resolved.get(key) if groups.rank == 0 else None)[0]

"""A config composed once and handed to the ranks as a file: `--frozen FILE`. Hydra is not asked again; the schema checks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from framework.base.errors import ConfigError
from framework.base.files import write_atomic
from framework.config.compose import build, to_dict
from framework.config.schema import Config

FROZEN = "--frozen"


def freeze(config: Config) -> list[str]:
    """Write the file, and return the words that name it. It lies beside the run folders: a run folder is claimed by its ranks."""
    folder = Path(config.run_dir)
    file = folder.parent / ".frozen" / f"{folder.name}.yaml"
    write_atomic(file, yaml.safe_dump(to_dict(config), sort_keys=False).encode())
    return [FROZEN, str(file)]


def take_frozen(words: Sequence[str]) -> tuple[Config | None, list[str]]:
    """The config that `--frozen FILE` names, and the other words: there are none then. Raises ConfigError."""
    if FROZEN not in words:
        return None, list(words)
    if len(words) != 2 or words[0] != FROZEN:
        raise ConfigError(FROZEN, " ".join(words), f"{FROZEN} FILE and no other word")
    try:
        plain = yaml.safe_load(Path(words[1]).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(FROZEN, str(error), "a file with a composed config") from None
    return build(Config, plain if isinstance(plain, dict) else {}), []

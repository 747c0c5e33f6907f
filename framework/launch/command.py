"""How a run is started, as data: the words of a command and the environment that goes with it. Pure; starts nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence

from framework.config.schema import Config

LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells its ranks; a rank of one run must not hand it on to another run."""
TRAIN = "framework.train"


def ranks_to_start(config: Config) -> int:
    """Ranks on which a program that starts runs by itself starts this one: launch.num_procs, or the model's ranks, at least 2."""
    return config.launch.num_procs or max(2, config.parallel.model_ranks)


def run_command(words: Sequence[str], ranks: int, port: int, module: str = TRAIN) -> list[str]:
    """The command that runs `module` with `words` on `ranks` processes of this host.

    Several ranks meet at TCP port `port` and are started by DeepSpeed's launcher, which the `deepspeed` command is.
    """
    if ranks == 1:
        return [sys.executable, "-m", module, *words]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(port)]
    return [*launcher, "--module", module, *words]


def run_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what makes a process a rank."""
    return {name: value for name, value in environment.items() if name not in LAUNCHER_SETS}


def word(key: str, value: object) -> str:
    """`key=value` as Hydra reads it: numbers and lists as they are, null for None, text in quotes."""
    return f"{key}={_quoted(value) if isinstance(value, str) else json.dumps(value)}"


def _quoted(text: str) -> str:
    """In single quotes; Hydra wants a quote escaped, and the backslashes that stand before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"

"""Going back: a start from a checkpoint that the user named begins a new line of the run there, and the old one must not win later."""

from __future__ import annotations

from framework.base.errors import ConfigError
from framework.checkpoint.store import Store
from framework.config.schema import Config
from framework.topology.groups import Groups
from framework.trainer import memory_tier
from framework.trainer.letters import letters
from framework.trainer.resume import Found, disk_root, is_named


def leave_line(config: Config, found: Found, groups: Groups) -> list[str]:
    """Set aside what the run has saved above the step it starts from, if the user named that; the paths where it is kept now.

    Otherwise a later resume=auto would go on from there. What lies in the memory tier is removed. A start that saves nothing
    begins no line. Every rank calls it. Raises ConfigError where the place of the checkpoints cannot be written.
    """
    kept: list[str] = []
    error: ConfigError | None = None
    if groups.rank == 0 and is_named(config) and config.checkpoint.mode != "none":
        step, tier = found.position.step, Store(str(memory_tier.memory_root(config.run_dir)))
        try:
            with letters(ConfigError):
                store = Store(disk_root(config))
                kept = [f"{store.root}/{name}" for name in store.set_aside(step)]
        except ConfigError as met:
            error = met
        if any(checkpoint.step > step for checkpoint in tier.complete()):
            memory_tier.remove(config.run_dir)
    groups.raise_together(error)
    return kept

"""Going back: a start from a checkpoint that the user named, and a run that returns to an earlier State of its own.

Either begins a new line of the run there, and the old one must not win later: what was saved above it is set aside.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError, RunError
from framework.checkpoint.store import Store
from framework.config.schema import Config
from framework.topology.groups import Groups
from framework.trainer import memory_tier
from framework.trainer.letters import letters
from framework.trainer.resume import Found, disk_root, is_named, restore_random, take_up
from framework.trainer.run import Run
from framework.trainer.saving import Saver


def leave_line(config: Config, found: Found, groups: Groups) -> list[str]:
    """Set aside what the run has saved above the step it starts from, if the user named that; the paths where it is kept now.

    Otherwise a later resume=auto would go on from there. What lies in the memory tier is removed. A start that saves nothing
    begins no line. Every rank calls it. Raises ConfigError where the place of the checkpoints cannot be written.
    """
    if not is_named(config) or config.checkpoint.mode == "none":
        return []
    return _set_aside(config, found.position.step, groups)


def _set_aside(config: Config, step: int, groups: Groups) -> list[str]:
    """What is saved above `step` counts no more: on the disk it gets other names, which are returned; in memory it goes."""
    kept: list[str] = []
    error: ConfigError | None = None
    if groups.rank == 0:
        try:
            with letters(ConfigError):
                store, tier = Store(disk_root(config)), Store(str(memory_tier.memory_root(config.run_dir)))
                kept = [f"{store.root}/{name}" for name in store.set_aside(step)]
                for name in tier.set_aside(step) if Path(tier.root).is_dir() else []:
                    shutil.rmtree(Path(tier.root, name), ignore_errors=True)
        except ConfigError as met:
            error = met
    groups.raise_together(error)
    return kept


class Rollback:
    """Returns a run to the newest State that it has saved up to a step, and passes over the data that it has read since. One on
    every rank."""

    def __init__(self, groups: Groups, saver: Saver, fingerprint: str) -> None:
        """`fingerprint` is that of the run's data."""
        self.groups, self.saver, self.fingerprint = groups, saver, fingerprint

    def to(self, run: Run, good: int) -> dict[str, Any]:
        """Go back to step `good` or before; what was done, for events.jsonl. Raises RunError where nothing was saved by then."""
        left, step = run.position.consumed_samples, run.position.step
        self.saver.settle()
        try:
            found = take_up(replace(run.config, resume="must"), self.groups, run.engine, self.fingerprint, good)
            assert found is not None
            kept = _set_aside(run.config, found.position.step, self.groups)
        except ConfigError as error:
            write = "checkpoint.every=N or checkpoint.memory_every=N, so that there is a State to go back to"
            raise RunError("alerts.actions", f"a rollback to step {good} or before; {error.got}", error.expected, write) from None
        random = restore_random(run.config, found, self.groups, run.streams)
        run.position.step = found.position.step
        self.saver.begin_at(run.position.step)
        passed_over = [found.position.consumed_samples, left]
        return {"event": "rollback", "step": step, "to": run.position.step, "samples": passed_over, "random": random, "set_aside": kept}

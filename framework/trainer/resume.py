"""Going on: which checkpoint a start takes up, and putting its State into a new run. Rank 0 decides, all ranks are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from framework.base.errors import ConfigError
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.load import load
from framework.checkpoint.manifest import step_name, step_of
from framework.checkpoint.state import restore_rng, rng_state
from framework.checkpoint.store import Checkpoint, Store
from framework.config.compose import build
from framework.config.identity import Change, changes, refuse_changes
from framework.config.schema import Config
from framework.engine import state as engine_state
from framework.topology.groups import Groups, accelerator
from framework.topology.random import seed_training, stream_seed
from framework.trainer.letters import letters
from framework.trainer.memory_tier import memory_root
from framework.trainer.run import Position, Run


@dataclass(frozen=True)
class Found:
    """A checkpoint that every rank has opened and that has proved sound; `passed_over` are letters about newer damaged ones."""

    checkpoint: Checkpoint
    root: str
    passed_over: tuple[str, ...]

    @property
    def small(self) -> dict[str, Any]:
        return self.checkpoint.manifest.small

    @property
    def position(self) -> Position:
        return Position(self.small["step"], self.small["consumed_samples"])


def disk_root(config: Config) -> str:
    """Where the run's checkpoints lie: a folder or an fsspec URL."""
    return config.checkpoint.root or f"{config.run_dir}/checkpoints"


def find(config: Config, groups: Groups) -> Found | None:
    """The newest complete and sound checkpoint that `resume` allows, the same on every rank; None to start from the beginning.

    Damaged ones are passed over for older ones, unless the user named one. Raises ConfigError or CheckpointError where
    there should be one and none can be used: never a silent start from zero.
    """
    if config.resume == "never":
        return None
    passed_over: list[str] = []
    while True:
        error: ConfigError | None = None
        choice: tuple[str, str] | None = None
        if groups.rank == 0:
            try:
                choice = _newest(config, len(passed_over))
            except ConfigError as met:
                error = met
        groups.raise_together(error)
        choice = groups.gather(choice)[0]
        if choice is None:
            return None
        fault, checkpoint = _prove(*choice, groups)
        if fault is None and checkpoint is not None:
            return Found(checkpoint, choice[0], tuple(passed_over))
        if _is_named(config):
            groups.raise_together(fault)
        passed_over.append(str(fault))


def _is_named(config: Config) -> bool:
    return config.resume not in ("auto", "must", "never")


def _newest(config: Config, skip: int) -> tuple[str, str] | None:
    """(root, folder name) of the newest complete checkpoint but `skip`; None where nothing was ever saved and nothing must be."""
    if _is_named(config):
        return _named(config.resume)
    roots = [disk_root(config), str(memory_root(config.run_dir))]
    complete: list[tuple[int, str]] = []
    damaged: list[CheckpointError] = []
    with letters(ConfigError):
        for root in roots:
            scan = Store(root).scan()
            complete += [(checkpoint.step, root) for checkpoint in scan.complete]
            damaged += scan.damaged
    complete.sort(key=lambda entry: entry[0], reverse=True)
    if len(complete) > skip:
        step, root = complete[skip]
        return root, step_name(step)
    if damaged or skip:
        got = damaged[-1].letter() if damaged else "checkpoints that are all damaged"
        raise ConfigError(f"checkpoints of {config.run_dir}", got, "one that is complete", "resume=never to start anew beside them")
    if config.resume == "must":
        raise ConfigError("resume", "must, and there is no checkpoint", f"a complete one in {disk_root(config)}", "resume=auto")
    return None


def _named(where: str) -> tuple[str, str]:
    """The checkpoint that a path means: a step's folder, or the newest of a checkpoints folder or a run folder."""
    root, _, name = where.rstrip("/").rpartition("/")
    if step_of(name) is not None:
        return root or ".", name
    with letters(ConfigError):
        for root in (where, f"{where.rstrip('/')}/checkpoints"):
            newest = Store(root).newest()
            if newest is not None:
                return root, step_name(newest.step)
    raise ConfigError("resume", where, "auto, never, must, or the path of a run or a checkpoint", "resume=runs/NAME")


def _prove(root: str, name: str, groups: Groups) -> tuple[ConfigError | None, Checkpoint | None]:
    """Open a checkpoint on every rank and compare the checksums, a share of the files on each."""
    checkpoint, error = None, None
    try:
        with letters(ConfigError):
            store = Store(root)
            checkpoint = store.open(name)
            ranks = groups.gather(groups.rank)
            store.verify(checkpoint, groups.rank, len(ranks))
    except ConfigError as met:
        error = met
    faults = [fault for fault in groups.gather(error) if fault is not None]
    return (faults[0] if faults else None), checkpoint


def meaning_changes(config: Config, found: Found, fingerprint: str) -> list[Change]:
    """What differs between the saved run and this one, data included. Raises ConfigError for a `meaning` not allowed to change."""
    listed = changes(build(Config, found.small["config"]), config)
    if found.small["data"] != fingerprint:
        listed.append(Change("the data's content", "meaning", found.small["data"], fingerprint))
    refuse_changes(listed, config, found.checkpoint.path)
    return listed


def restore(run: Run, found: Found) -> None:
    """Put tensors and counters into the run's engine. Every rank calls it."""

    def fill(wanted: engine_state.Collected) -> None:
        with letters(ConfigError):
            load(found.checkpoint, wanted)

    engine_state.restore(run.engine, fill, found.small["counters"])


def random_state() -> dict[str, Any]:
    """The state of every generator of this rank, as plain data."""
    return rng_state(_device_generator())


def restore_random(config: Config, found: Found, groups: Groups) -> str:
    """Put every generator back to where it was, once all iterators exist; what was done, in words."""
    local = found.checkpoint.manifest.local
    ranks = len(groups.gather(0))
    if len(local) != ranks:
        seed_training(stream_seed(config.seed, "resumed", found.small["step"]), groups.place.data)
        return f"random numbers begin anew: saved on {len(local)} ranks, {ranks} now"
    left = restore_rng(local[groups.rank]["rng"], _device_generator())
    return "random numbers go on" if not left else f"random numbers of {', '.join(left)} begin anew"


def event(found: Found, listed: list[Change], random: str) -> dict[str, Any]:
    """What a start that goes on says of itself in events.jsonl."""
    return {
        "event": "resume",
        "step": found.small["step"],
        "from": f"{found.root}/{step_name(found.small['step'])}",
        "passed_over": list(found.passed_over),
        "changes": [f"{change.key} [{change.tag}]: {change.old} -> {change.new}" for change in listed],
        "random": random,
    }


def _device_generator() -> Any:
    """The accelerator's generator; None on CPU, whose generator is torch's own."""
    device = accelerator()
    return None if device.device_name() == "cpu" else device

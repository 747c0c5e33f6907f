"""Going on: which checkpoint a start takes up, and putting its State into a new engine. Rank 0 decides, all ranks are told.

A checkpoint proves sound while it is loaded: its bytes are read once. Where one turns out to be damaged the tensors are
filled again from an older one, or the start fails; a half-filled engine is never trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from framework.base.errors import ConfigError
from framework.checkpoint.errors import CheckpointError
from framework.checkpoint.load import load
from framework.checkpoint.manifest import step_name
from framework.checkpoint.scaling import MOMENTS
from framework.checkpoint.state import restore_rng, rng_state
from framework.checkpoint.store import Checkpoint, Store, find
from framework.config import parameters
from framework.config.compose import build
from framework.config.identity import Change, changes, refuse_changes
from framework.config.schema import Config
from framework.engine import state as engine_state
from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from framework.monitor.sinks import read_lines
from framework.topology.groups import Groups, accelerator
from framework.topology.random import Streams, seed_training, stream_seed
from framework.trainer.letters import letters
from framework.trainer.memory_tier import memory_root
from framework.trainer.run import Position

T = TypeVar("T")

Choice = tuple[str, str, tuple[str, ...]]
"""Root and folder name of a checkpoint, and letters about the damaged ones that were passed over for it."""


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run goes on from.

    `changes` are the settings that differ from the saved run's, `passed_over` letters about checkpoints that are damaged.
    """

    checkpoint: Checkpoint
    root: str
    changes: tuple[Change, ...]
    passed_over: tuple[str, ...]

    @property
    def small(self) -> dict[str, Any]:
        return self.checkpoint.manifest.small

    @property
    def windows(self) -> dict[str, Any]:
        """What alerts remembered then; empty in a State that was saved before there were any."""
        return self.small.get("windows", {})

    @property
    def position(self) -> Position:
        return Position(self.small["step"], self.small["consumed_samples"])


def disk_root(config: Config) -> str:
    """Where the run's checkpoints lie: a folder or an fsspec URL."""
    return config.checkpoint.root or f"{config.run_dir}/checkpoints"


def take_up(
    config: Config, groups: Groups, engine: DeepSpeedEngine | PlainEngine, fingerprint: str, until: int | None = None
) -> Found | None:
    """Fill `engine` from the newest complete and sound checkpoint that `resume` allows, of at most the step `until`, the same on
    every rank.

    None to start from the beginning. Damaged ones are passed over for older ones, unless the user named one. Raises
    ConfigError where there should be one and none can be used (never a silent start from zero), and for a `meaning` that is
    not allowed to change; `fingerprint` is that of this run's data.
    """
    if config.resume == "never":
        return None
    passed_over: list[CheckpointError] = []
    while True:
        choice = _choose(config, passed_over, groups, until)
        if choice is None:
            return None
        try:
            root, name, damaged = choice
            checkpoint = _open(root, name, groups)
            listed = _changes(config, checkpoint, fingerprint)
            _refuse_other_model(config, checkpoint)
            restore(engine, checkpoint, groups)
        except CheckpointError as fault:
            if is_named(config):
                with letters(ConfigError):
                    raise
            passed_over.append(fault)
        else:
            return Found(checkpoint, root, tuple(listed), damaged)


def restore(engine: DeepSpeedEngine | PlainEngine, checkpoint: Checkpoint, groups: Groups) -> None:
    """Put tensors and counters into the engine. Every rank calls it.

    Each compares the checksums of a share of the files. Raises CheckpointError, on every rank, where any met one; the
    engine's tensors are then neither the old nor the new.
    """
    checked = checkpoint.manifest.share(groups.rank, len(groups.gather(0)))

    def fill(wanted: engine_state.Collected) -> None:
        _together(groups, lambda: load(checkpoint, wanted, checked))

    engine_state.restore(engine, fill, checkpoint.manifest.small["counters"])


def _together(groups: Groups, work: Callable[[], T]) -> T:
    """What `work` returns on this rank, or on every rank the first CheckpointError that any rank met."""
    result: T | None = None
    error: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as met:
        error = met
    for found in groups.gather(error):
        if found is not None:
            raise found
    return cast(T, result)


def _open(root: str, name: str, groups: Groups) -> Checkpoint:
    store = Store(root)
    checkpoint = _together(groups, lambda: store.open(name))
    _together(groups, lambda: store.refuse_extra(checkpoint))
    return checkpoint


def _choose(config: Config, passed_over: list[CheckpointError], groups: Groups, until: int | None) -> Choice | None:
    """What `_newest` says on the first rank, on every rank."""
    error: ConfigError | None = None
    choice: Choice | None = None
    if groups.rank == 0:
        try:
            choice = _newest(config, passed_over, until)
        except ConfigError as met:
            error = met
    groups.raise_together(error)
    return groups.gather(choice)[0]


def is_named(config: Config) -> bool:
    """Whether the user has said which checkpoint, by its path."""
    return config.resume not in ("auto", "must", "never")


def _newest(config: Config, passed_over: list[CheckpointError], until: int | None) -> Choice | None:
    """The newest complete checkpoint but those passed over; None where none was ever saved and none must be."""
    if is_named(config):
        with letters(ConfigError):
            named = find(config.resume)
        if named is None:
            raise ConfigError("resume", config.resume, "auto, never, must, or the path of a run or a checkpoint", "resume=runs/NAME")
        return *named, ()
    complete: list[tuple[int, str]] = []
    faults = list(passed_over)
    with letters(ConfigError):
        for root in (disk_root(config), str(memory_root(config.run_dir))):
            store = Store(root)
            store.sweep()  # a save that was killed when it lacked nothing but its name gets it now
            scan = store.scan()
            complete += [(checkpoint.step, root) for checkpoint in scan.complete if until is None or checkpoint.step <= until]
            faults += scan.damaged
    complete.sort(key=lambda entry: entry[0], reverse=True)
    if len(complete) > len(passed_over):
        step, root = complete[len(passed_over)]
        return root, step_name(step), tuple(fault.letter() for fault in faults)
    _refuse_zero(config, faults)
    return None


def _refuse_zero(config: Config, faults: list[CheckpointError]) -> None:
    """Raise ConfigError unless a start from the beginning is what the user means: no checkpoint can be used, `faults` say why."""
    subject, place = f"checkpoints of {config.run_dir}", disk_root(config)
    if faults:
        raise ConfigError(subject, faults[0].letter(), "one that can be used", "resume=never to start anew beside them")
    saved = [line["step"] for line in read_lines(Path(config.run_dir) / "events.jsonl") if line["event"] == "checkpoint"]
    if saved:
        got = f"none in {place}, though step {saved[-1]} was saved"
        raise ConfigError(subject, got, "at least one", "resume=PATH where they are now, or resume=never to start anew")
    if config.resume == "must":
        raise ConfigError("resume", "must, and there is no checkpoint", f"a complete one in {place}", "resume=auto")


def _changes(config: Config, checkpoint: Checkpoint, fingerprint: str) -> list[Change]:
    """What differs between the saved run and this one, data included. Raises ConfigError for a `meaning` not allowed to change."""
    small = checkpoint.manifest.small
    listed = changes(build(Config, small["config"]), config)
    if small["data"] != fingerprint:
        listed.append(Change("the data's content", "meaning", small["data"], fingerprint))
    refuse_changes(listed, config, checkpoint.path)
    return listed


def _refuse_other_model(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for tensors that this run's model does not have; `load` finds those that the checkpoint does not have."""
    known = {entry.name for entry in parameters.table(config.model) if entry.tied_to is None}
    unknown = sorted({name for _, name in checkpoint.pieces} - known)
    if unknown:
        got = f"{len(unknown)} tensors that this model does not have, {unknown[0]} among them"
        raise CheckpointError(checkpoint.path, got, "tensors of this model: the checkpoint is of another model")


def random_state(streams: Streams) -> dict[str, Any]:
    """The state of every generator and stream of this rank, as plain data."""
    return rng_state(_device_generator(), streams.states)


def restore_random(config: Config, found: Found, groups: Groups, streams: Streams) -> str:
    """Put every generator back to where it was, once all iterators exist; what was done, in words."""
    local = found.checkpoint.manifest.local
    ranks = len(groups.gather(0))
    if len(local) != ranks:
        seed_training(stream_seed(config.seed, "resumed", found.small["step"]), groups.place, streams)
        return f"random numbers begin anew: saved on {len(local)} ranks, {ranks} now"
    left = restore_rng(local[groups.rank]["rng"], _device_generator(), streams.states)
    return "random numbers go on" if not left else f"random numbers of {', '.join(left)} begin anew"


def event(found: Found, random: str, set_aside: list[str]) -> dict[str, Any]:
    """What a start that goes on says of itself in events.jsonl."""
    pieces = [piece for (kind, _), pieces in found.checkpoint.pieces.items() if kind in MOMENTS for piece in pieces]
    rounded = sorted({piece.shard.dtype for piece in pieces} - {"F32"})
    return {
        "event": "resume",
        "step": found.small["step"],
        "from": f"{found.root}/{step_name(found.small['step'])}",
        "passed_over": list(found.passed_over),
        "changes": [f"{change.key} [{change.tag}]: {change.old} -> {change.new}" for change in found.changes],
        "moments": f"kept as {', '.join(rounded)}: close to the run that was stopped, not bit-equal" if rounded else "as they were",
        "random": random,
        "set_aside": set_aside,
    }


def _device_generator() -> Any:
    """The accelerator's generator; None on CPU, whose generator is torch's own."""
    device = accelerator()
    return None if device.device_name() == "cpu" else device

"""The hook that saves: every rank's State to disk or to memory, in this process or beside it, as often as told.

All ranks decide alike, because they decide on numbers that all of them have: the step, and the votes that each step brings
("saving": ranks whose writer is still at work; "save_failed": ranks whose writer has failed).
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from framework.base.errors import ConfigError, RunError
from framework.checkpoint.buffers import Buffers, live
from framework.checkpoint.manifest import FROZEN, arrange, step_name
from framework.checkpoint.save import Job, Result, commit, write_part
from framework.checkpoint.scaling import halve
from framework.checkpoint.state import NAMES, State
from framework.checkpoint.store import Store
from framework.checkpoint.writer import Writer
from framework.config.compose import to_dict
from framework.config.schema import Checkpoint
from framework.engine import state as engine_state
from framework.monitor.runfile import End, versions
from framework.monitor.sinks import loss_history
from framework.topology.groups import Groups, accelerator
from framework.topology.timers import Timers
from framework.trainer import memory_tier
from framework.trainer.interval import Interval
from framework.trainer.letters import letters
from framework.trainer.records import Records
from framework.trainer.resume import disk_root, random_state
from framework.trainer.run import Quiet, Run, Turn

WARM = 2
"""Steps of a start that are no measure of the others."""
Small = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Where States go: `disk` is a folder or URL, `memory` a folder under the shared-memory file system or None.

    `session` is a word that is the same on all ranks of one start and differs between starts.
    """

    disk: str
    memory: str | None
    session: str


@dataclass(frozen=True)
class Says:
    """What the saver tells and is told: `state` gives the small and the local state of a run; `event` writes to
    events.jsonl on the first rank and does nothing elsewhere; `chosen` keeps the interval that auto has chosen; `best`
    tells which of the saved steps to keep for their held-out loss."""

    state: Callable[[Run], tuple[Small, Small]]
    event: Callable[[Small], None]
    chosen: Callable[[int], None]
    best: Callable[[list[int]], list[int]]


@dataclass
class Pending:
    """A save that was begun, and what it has cost this rank in seconds so far: waiting for it between two steps (`stall_s`), and
    what the steps beside it took longer (`slowed_s`), of which `held_s` was waiting for the copy. `cpu_s` are the processor's
    seconds of copy and writer: on a machine without an idle core the steps pay for them, whatever a noisy clock says."""

    job: Job
    tier: str
    begun: float
    stall_s: float = 0.0
    slowed_s: float = 0.0
    held_s: float = 0.0
    cpu_s: float = 0.0
    copying: bool = False

    @property
    def cost_s(self) -> float:
        return max(self.stall_s + max(0.0, self.slowed_s), self.cpu_s)


class Saver(Quiet):
    """One on every rank."""

    def __init__(self, settings: Checkpoint, places: Places, groups: Groups, writer: Writer | None, says: Says, interval: Interval) -> None:
        """`writer` is this rank's writer process; None saves in this process while the training waits."""
        self.settings, self.places, self.groups, self.says, self.interval = settings, places, groups, says, interval
        self.writer = writer
        self.buffers = Buffers(writer.memory, pin=accelerator().device_name() == "cuda") if writer is not None else None
        self.ranks = len(groups.gather(groups.rank))
        self.pending: Pending | None = None
        self.error: RunError | None = None
        self.linked: dict[str, str] = {}
        self.warm = WARM
        self.on_disk = 0  # the step of the newest State there
        self.step_times: deque[float] = deque(maxlen=50)

    def start(self, run: Run) -> None:
        run.feed.votes["saving"] = lambda: float(self._at_work())
        run.feed.votes["save_failed"] = lambda: float(self.error is not None)
        run.engine.hold = lambda: self._hold(run.engine.timers)
        self.begin_at(run.position.step)
        self.warm = run.position.step + WARM
        shards = [shard for shard, _ in self._kept(run)]
        nbytes = round(self.groups.agree([sum(shard.nbytes for shard in shards)])[0])
        error: ConfigError | None = None
        try:
            with letters(ConfigError):
                if self.groups.rank == 0:
                    self._make_room(run, nbytes)
                if self.buffers is not None:  # now, so that the first save does not wait for its memory
                    self.buffers.prepare(shards, arrange(shards, self.groups.rank))
        except ConfigError as met:
            error = met
        self.groups.raise_together(error)

    def _make_room(self, run: Run, nbytes: int) -> None:
        """On the first rank: away with what processes left that died while they wrote; a place in memory if one is wanted."""
        Store(self.places.disk).sweep()
        memory_tier.sweep()
        if self.places.memory is not None:
            memory_tier.prepare(run.config.run_dir, nbytes)

    def after_step(self, run: Run, turn: Turn) -> None:
        if turn.votes.get("save_failed"):
            self.groups.raise_together(self.error)
        if self.pending is not None:
            self.pending.slowed_s += turn.step_time_s - self._usual_step_s()
            if not turn.votes["saving"]:
                self._complete()
        elif turn.step > self.warm:
            self.step_times.append(turn.step_time_s)
        with run.clock.aside("checkpoint"):
            self._save_if_due(run, turn)

    def stop(self, run: Run) -> None:
        """The last finished step's State, complete on the disk."""
        self._await()
        if self.on_disk != run.position.step:
            self._save(run, run.position.step, "disk")
            self._await()

    def end(self, run: Run, status: End) -> None:
        """Let a save that was begun come to its end, also when the run has failed."""
        if self.writer is not None:
            self._release()
            with letters(RunError):
                self.writer.close()
        if status == "done" and self.groups.rank == 0:
            memory_tier.remove(run.config.run_dir)

    def settle(self) -> None:
        """Let a save under way come to its end, on all ranks."""
        self._await()

    def begin_at(self, step: int) -> None:
        """The run goes on from `step`, whose State is saved."""
        self.interval.begin(step)
        self.on_disk = step
        self.linked.clear()

    def _save_if_due(self, run: Run, turn: Turn) -> None:
        tier = self._tier(turn)
        if tier is not None and self.pending is not None and self.settings.busy == "skip" and not turn.last:
            self.says.event({"event": "checkpoint_skipped", "step": turn.step, "because": f"step {self.pending.job.step} is being written"})
        elif tier is not None:
            self._await()
            self._save(run, turn.step, tier)
        if turn.last:
            self._await()

    def _tier(self, turn: Turn) -> str | None:
        """Where this step's State goes: the disk if it is due there, or else memory, or nowhere."""
        if turn.last or self.interval.due(turn.step):
            return "disk"
        every = self.settings.memory_every
        return "memory" if every > 0 and turn.step % every == 0 else None

    def _kept(self, run: Run) -> engine_state.Collected:
        """What this rank has to write, in the types in which it is to be kept."""
        collected, name = engine_state.collect(run.engine), self.settings.optimizer_dtype
        return collected if name == "fp32" else halve(collected, NAMES[name])

    def _save(self, run: Run, step: int, tier: str) -> None:
        begun = time.perf_counter()
        state = State(self._kept(run), *self.says.state(run))
        root = self.places.disk if tier == "disk" else str(self.places.memory)
        trained = [(shard, tensor) for shard, tensor in state.shards if shard.kind != FROZEN]
        linked = self.linked.get(tier, "") if len(trained) < len(state.shards) else ""
        if linked:  # what is not trained was written before, and is referred to
            state.shards = trained
        files = arrange([shard for shard, _ in state.shards], self.groups.rank)
        attempt = f"{self.places.session}-{tier}-{step}"
        job = Job(root, step, attempt, self.groups.rank, self.ranks, files, state.small, state.local, linked)
        self.pending = Pending(job, tier, begun)
        if tier == "disk":
            self.interval.saved(step)
            self.on_disk = step
        if self.writer is None or self.buffers is None:
            self._write_here(job, state)
        else:
            with letters(RunError):
                self.buffers.copy(state, files)
            self.pending.copying = True
        self.pending.stall_s += time.perf_counter() - begun
        if self.writer is None:
            self._complete()

    def _write_here(self, job: Job, state: State) -> None:
        """A save that the training waits for: each rank its part, then the first rank the manifest."""
        for work in (lambda: write_part(job, live(state)), lambda: commit(job) if job.rank == 0 else None):
            error = None
            try:
                with letters(RunError):
                    work()
            except RunError as met:
                error = met
            self.groups.raise_together(error)

    def _hold(self, timers: Timers) -> None:
        """Before the state changes again: a copy that was begun has to be complete."""
        if self.pending is not None and self.pending.copying:
            begun = time.perf_counter()
            with timers.part("checkpoint"):
                self._release()
            self.pending.held_s += time.perf_counter() - begun

    def _release(self) -> None:
        """Wait for a copy that was begun, and give it to the writer."""
        if self.pending is not None and self.pending.copying and self.writer is not None and self.buffers is not None:
            self.buffers.wait()
            self.writer.submit(self.pending.job)
            self.pending.copying = False

    def _note(self, result: Result | None) -> None:
        if result is not None and self.pending is not None and self.buffers is not None:
            self.pending.cpu_s = result.cpu_s + self.buffers.copy_s

    def _at_work(self) -> bool:
        """Whether this rank's writer has still to finish; takes its result, or its error, where it has."""
        if self.writer is None or self.pending is None or self.error is not None:
            return False
        if self.pending.copying:
            return True
        try:
            with letters(RunError):
                self._note(self.writer.poll())
        except RunError as error:
            self.error = error
        return self.writer.busy

    def _await(self) -> None:
        """Wait for the save under way, on all ranks."""
        if self.pending is None or self.writer is None:
            return
        begun = time.perf_counter()
        self._release()
        try:
            with letters(RunError):
                self._note(self.writer.wait())
        except RunError as error:
            self.error = error
        self.pending.stall_s += time.perf_counter() - begun
        self.groups.raise_together(self.error)
        self._complete()

    def _complete(self) -> None:
        """Every rank's part is written and the checkpoint is there: account for it, and let old ones go."""
        assert self.pending is not None
        save, self.pending = self.pending, None
        # The slowest rank's cost, and one step time for all: ranks that chose for themselves would save at different steps.
        costs, step_times = zip(*self.groups.gather((save.cost_s, self._usual_step_s())), strict=True)
        cost_s, step_s = max(costs), max(step_times)
        self.linked[save.tier] = step_name(save.job.step)
        chosen = self.interval.learn(cost_s, step_s) if save.tier == "disk" else None
        if chosen is not None:
            self.says.chosen(chosen)
        if self.groups.rank == 0:
            expected = self.interval.cost_s / ((chosen or 1) * max(step_s, 1e-9))
            overhead = {} if chosen is None else {"every": chosen, "expected_overhead": expected}
            self._account(save, {"cost_s": cost_s, **overhead})

    def _account(self, save: Pending, cost: Small) -> None:
        """On the first rank: the event, and what retention says."""
        with letters(RunError):
            store = Store(save.job.root)
            nbytes = store.open(step_name(save.job.step)).manifest.nbytes
            if save.tier == "memory":
                gone = store.prune(save.job.step, keep_last=1)
            else:
                best = self.says.best([checkpoint.step for checkpoint in store.complete()])
                gone = store.prune(save.job.step, self.settings.keep_last, self.settings.keep_every, best)
        event = {"event": "checkpoint", "kind": f"{self.settings.mode} {save.tier}", "step": save.job.step, "bytes": nbytes,
                 "stall_s": save.stall_s + save.held_s, "write_s": time.perf_counter() - save.begun, **cost, "removed": gone}  # fmt: skip
        self.says.event(event)

    def _usual_step_s(self) -> float:
        """Median seconds of the steps beside which nothing was written."""
        return statistics.median(self.step_times) if self.step_times else 0.0


def make_saver(run: Run, groups: Groups, records: Records, writer: Writer | None, fingerprint: str, windows: Callable[[], Small]) -> Saver:
    """The saver of a run that keeps State; `fingerprint` tells its data apart, `windows` is what alerts remember."""
    settings = run.config.checkpoint
    memory = str(memory_tier.memory_root(run.config.run_dir)) if settings.memory_every > 0 else None
    places = Places(Store(disk_root(run.config)).root, memory, groups.gather(uuid.uuid4().hex[:12])[0])

    always = {"data": fingerprint, "config": to_dict(run.config), "versions": versions()}  # once: each would make every save wait

    def state(run: Run) -> tuple[Small, Small]:
        small = {
            "step": run.position.step,
            "consumed_samples": run.position.consumed_samples,
            "counters": engine_state.counters(run.engine),
            "tracker_run_id": records.tracker_run_id,
            "windows": windows(),
            **always,
        }
        return small, {"rng": random_state(run.streams)}

    def best(saved: list[int]) -> list[int]:
        held_out = loss_history(run.folder / "metrics.jsonl")[1] if settings.keep_best else {}
        return sorted(held_out.keys() & saved, key=lambda step: held_out[step])[: settings.keep_best]

    fixed = None if settings.every == "auto" else settings.every
    chosen = groups.gather(records.resolved("checkpoint.every"))[0]
    says = Says(state, records.event, lambda steps: records.resolve("checkpoint.every", steps), best)
    return Saver(settings, places, groups, writer, says, Interval(fixed, chosen, settings.mtbf_hours))

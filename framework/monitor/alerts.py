"""What goes wrong in a run, in numbers, and which setting to change. Pure: numbers in, alerts out; nothing is done about them here.

Shares are judged over all ranks in the way that blames one cause only: a rank that waits for a slower one shows it as communication,
so communication counts as far as even the rank with the least of it waits.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.config.rules_run import ACTS, TELLS
from framework.config.schema import Alerts, Config

HISTORY, LEAST = 50, 8
"""Steps that a spike is measured against: the last so many, and no spike before there are a few."""
TO_SIGMA = 1.4826
"""From the median of absolute deviations to the standard deviation of a normal distribution (Rousseeuw & Croux 1993, section 1)."""


@dataclass(frozen=True)
class Alert:
    """`value` has passed `limit`; `rank` is whose, None: everybody's. `says` is a sentence, `change` the settings to change."""

    kind: str
    value: float
    limit: float
    says: str
    change: str
    rank: int | None = None


@dataclass(frozen=True)
class Load:
    """One rank over a window of steps: medians in seconds, and shares. `memory` is of what the rank may take, `utilisation` None
    where nobody can say."""

    step_s: float
    data_s: float
    communication_s: float
    recompute_s: float
    checkpoint_s: float
    memory: float
    utilisation: float | None = None

    @property
    def work_s(self) -> float:
        """What the rank itself does, whatever it waits for."""
        return self.step_s - self.data_s - self.communication_s - self.checkpoint_s


def share(seconds: float, load: Load) -> float:
    """Of the load's step."""
    return seconds / load.step_s if load.step_s > 0 else 0.0


def median_load(steps: Sequence[tuple[float, Mapping[str, float]]], memory: float, utilisation: float | None) -> Load:
    """Of the steps (seconds, seconds by part) of a window."""
    seconds = statistics.median(seconds for seconds, _ in steps)
    names = ("data", "communication", "recompute", "checkpoint")
    data, communication, recompute, held = (statistics.median(parts.get(name, 0.0) for _, parts in steps) for name in names)
    return Load(seconds, data, communication, recompute, held, memory, utilisation)


def summary(loads: Sequence[Load]) -> dict[str, Any]:
    """The ranks of a window in few numbers, for ranks.jsonl: of each figure [least, median, most], and which rank works longest."""
    figures = {
        "step_s": [load.step_s for load in loads],
        "work_s": [load.work_s for load in loads],
        "data_s": [load.data_s for load in loads],
        "communication_s": [load.communication_s for load in loads],
        "recompute_s": [load.recompute_s for load in loads],
        "memory": [load.memory for load in loads],
        "utilisation": [load.utilisation for load in loads if load.utilisation is not None],
    }
    short = {name: [min(values), statistics.median(values), max(values)] for name, values in figures.items() if values}
    return {"ranks": len(loads), "slowest": _most(figures["work_s"])[0], **short}


def look(loads: Sequence[Load], config: Config) -> list[Alert]:
    """What the loads of all ranks, in rank order, have passed of the limits."""
    checks = (_memory, _communication, _utilisation, _data_wait, _recompute, _straggler)
    return [alert for check in checks if (alert := check(loads, config)) is not None]


def _most(values: Sequence[float]) -> tuple[int, float]:
    rank = max(range(len(values)), key=values.__getitem__)
    return rank, values[rank]


def _memory(loads: Sequence[Load], config: Config) -> Alert | None:
    limit = config.alerts.memory
    rank, value = _most([load.memory for load in loads])
    if limit is None or value <= limit:
        return None
    return Alert("memory", value, limit, f"rank {rank} has had {value:.0%} of its memory in use", _less_memory(config), rank)


def _less_memory(config: Config) -> str:
    words = []
    if config.recompute.granularity == "none":
        words.append("recompute=full, or recompute=auto")
    if config.batch.micro > 1:
        words.append(f"batch.micro_size={max(1, config.batch.micro // 2)}")
    if config.zero.stage < 3 and config.parallel.pipeline == 1:
        words.append(f"zero=stage{config.zero.stage + 1}")
    return ", or ".join(words) or "parallel.tensor or parallel.pipeline higher; python -m framework.plan says by how much"


def _communication(loads: Sequence[Load], config: Config) -> Alert | None:
    limit = config.alerts.communication
    value = min(share(load.communication_s, load) for load in loads)
    if limit is None or value <= limit or len(loads) == 1:
        return None
    words = []
    if not config.zero.overlap_comm and config.parallel.pipeline == 1:
        words.append("zero.overlap_comm=true")
    if config.zero.stage == 3:
        words.append("zero=stage2, which gathers no weights")
    if config.parallel.pipeline > 1:
        words.append("batch.micro_size lower or batch.global_size higher: more micro-batches, a smaller bubble")
    else:
        words.append("batch.micro_size or batch.global_size higher: more work for each message")
    return Alert("communication", value, limit, f"every rank waits {value:.0%} of each step for the others", ", or ".join(words))


def _utilisation(loads: Sequence[Load], config: Config) -> Alert | None:
    known = [load.utilisation for load in loads if load.utilisation is not None]
    low, high = config.alerts.utilisation_low, config.alerts.utilisation_high
    if known and low is not None and min(known) < low:
        says = f"an accelerator computes {min(known):.0%} of the time"
        return Alert("utilisation", min(known), low, says, "batch.micro_size higher, or compile=blocks")
    if known and high is not None and min(known) > high:
        says = f"every accelerator computes {min(known):.0%} of the time: a slower step has no room"
        return Alert("utilisation", min(known), high, says, "nothing, if that is meant: alerts.utilisation_high=null")
    return None


def _data_wait(loads: Sequence[Load], config: Config) -> Alert | None:
    limit = config.alerts.data_wait
    rank, value = _most([share(load.data_s, load) for load in loads])
    if limit is None or value <= limit:
        return None
    workers = config.data.workers
    more = "data.workers=2" if workers in (None, 0) else f"data.workers={2 * workers}"
    change = f"{more}, or data.prefetch={2 * config.data.prefetch}"
    return Alert("data_wait", value, limit, f"rank {rank} waits {value:.0%} of each step for its data", change, rank)


def _recompute(loads: Sequence[Load], config: Config) -> Alert | None:
    limit = config.alerts.recompute
    rank, value = _most([share(load.recompute_s, load) for load in loads])
    memory, most = max(load.memory for load in loads), 0.5 * (config.alerts.memory or 1.0)
    if limit is None or value <= limit or memory >= most:
        return None
    says = f"rank {rank} computes {value:.0%} of each step a second time, and {memory:.0%} of the memory is in use"
    return Alert("recompute", value, limit, says, "recompute=none, recompute=selective or recompute=auto", rank)


def _straggler(loads: Sequence[Load], config: Config) -> Alert | None:
    limit = config.alerts.straggler
    works = [load.work_s for load in loads]
    rank, slowest = _most(works)
    usual = statistics.median_low(works)
    if limit is None or len(loads) == 1 or usual <= 0 or slowest / usual <= limit:
        return None
    says = f"rank {rank} works {slowest:.3f} s in each step, the rank in the middle {usual:.3f} s"
    remedy = "launch.exclude its host, or give it as many cores (launch.threads) as the others"
    change = f"parallel.partition=measured, or {remedy}" if config.parallel.pipeline > 1 else remedy
    return Alert("straggler", slowest / usual, limit, says, change, rank)


class Spikes:
    """Values against the last ones: how far above their median one lies, in their standard deviations, both by medians."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=HISTORY)

    def height(self, value: float) -> float:
        """In standard deviations; 0 while there are too few values, and for one that is not finite."""
        if len(self.values) < LEAST or not math.isfinite(value):
            return 0.0
        middle = statistics.median(self.values)
        spread = TO_SIGMA * statistics.median(abs(one - middle) for one in self.values)
        return (value - middle) / max(spread, 1e-3 * abs(middle), 1e-12)  # values that are all but equal spread a little all the same

    def add(self, value: float) -> None:
        """Take in a value that later ones are measured against."""
        if math.isfinite(value):
            self.values.append(value)


@dataclass(frozen=True)
class Told:
    """What one step says of itself, the same on every rank. `refused`: it was skipped because an alert wanted it."""

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    refused: bool = False


class Course:
    """The course of a run, step by step: spikes, numbers that are none, skipped steps. Its windows survive a restart."""

    def __init__(self, limits: Alerts, config: Config) -> None:
        self.limits, self.precision = limits, config.precision
        self.losses, self.norms, self.skips = Spikes(), Spikes(), 0

    def spikes(self, loss: float) -> bool:
        """Whether a step of this loss would be a spike."""
        return self.limits.loss_spike is not None and self.losses.height(loss) > self.limits.loss_spike

    def step(self, told: Told) -> list[Alert]:
        """What is wrong with a step. One that is wrong is not taken for what is usual."""
        self.skips = self.skips + 1 if told.skipped and not told.refused else 0
        found = self._nan(told) or self._spike(told)
        if found is None and not told.skipped:
            self.losses.add(told.loss)
            self.norms.add(told.grad_norm)
        return [alert for alert in (found, self._skipped(told)) if alert is not None]

    def state(self) -> dict[str, Any]:
        """The windows as plain data."""
        return {"losses": list(self.losses.values), "norms": list(self.norms.values), "skips": self.skips}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the windows of `state`."""
        self.losses.values.extend(state["losses"])
        self.norms.values.extend(state["norms"])
        self.skips = state["skips"]

    @property
    def _scaled(self) -> bool:
        return self.precision.dtype == "fp16"

    def _nan(self, told: Told) -> Alert | None:
        bad = [name for name, value in (("loss", told.loss), ("gradient norm", told.grad_norm)) if not math.isfinite(value)]
        if not self.limits.nan or not bad or told.refused or (self._scaled and told.skipped and math.isfinite(told.loss)):
            return None
        says = f"the {' and the '.join(bad)} of step {told.step} {'is' if len(bad) == 1 else 'are'} not finite"
        return Alert("nan", math.nan, math.inf, says, "optimizer.lr lower, clip_grad_norm=1.0, or alerts.actions=[nan:rollback]")

    def _spike(self, told: Told) -> Alert | None:
        """A loss that jumps, or else a gradient: both together are one thing."""
        height, limit = self.losses.height(told.loss), self.limits.loss_spike
        if limit is not None and height > limit:
            says = f"the loss of step {told.step} is {told.loss:.4f}, {height:.0f} standard deviations above the last ones"
            return Alert("loss_spike", height, limit, says, "optimizer.lr lower, or alerts.actions=[loss_spike:skip]")
        height, limit = self.norms.height(told.grad_norm), self.limits.grad_spike
        if limit is not None and height > limit:
            says = f"the gradient norm of step {told.step} is {told.grad_norm:.4g}, {height:.0f} standard deviations above the last ones"
            return Alert("grad_spike", height, limit, says, "clip_grad_norm lower, or schedule.warmup_steps higher")
        return None

    def _skipped(self, told: Told) -> Alert | None:
        most = self.limits.skipped
        floor = not self.precision.autocast and told.skipped and told.loss_scale <= self.precision.min_scale
        if not self._scaled or most == 0 or not (self.skips >= most or floor):
            return None
        why = f"{self.skips} steps were skipped in a row" if self.skips >= most else f"the loss scale is at its floor, {told.loss_scale:g}"
        says = f"{why}: gradients overflow in fp16"
        return Alert("skipped", float(self.skips), float(most), says, "precision=bf16, or a lower optimizer.lr")


def drift(hashes: Sequence[Sequence[str]], step: int) -> Alert | None:
    """What ranks hold alike, compared: each sequence has the hashes of one part of the model, of every data rank."""
    apart = [(part, len(set(found))) for part, found in enumerate(hashes) if len(set(found)) > 1]
    if not apart:
        return None
    part, different = apart[0]
    rank = _odd_one(hashes[part])
    who = f"data rank {rank} has other weights than the rest" if rank is not None else f"the data ranks have {different} kinds of weights"
    change = "alerts.actions=[drift:rollback]; a host that does it again: launch.exclude"
    return Alert("drift", float(different), 1.0, f"after step {step} {who}", change, rank)


def _odd_one(found: Sequence[str]) -> int | None:
    """The only one that differs from all others, if there is one among three or more."""
    odd = [rank for rank, one in enumerate(found) if found.count(one) == 1]
    return odd[0] if len(odd) == 1 and len(found) > 2 else None


class Edges:
    """Alerts when they begin, not while they last."""

    def __init__(self) -> None:
        self.on: set[str] = set()

    def rising(self, alerts: Sequence[Alert], judged: Sequence[str]) -> list[Alert]:
        """Those that were not there the last time; `judged` are the kinds that were looked at."""
        now = {alert.kind for alert in alerts}
        new = [alert for alert in alerts if alert.kind not in self.on]
        self.on = (self.on - set(judged)) | now
        return new


def actions(kind: str, settings: Alerts) -> list[str]:
    """What is to be done at an alert of a kind, in the order of TELLS and ACTS."""
    wanted = {action for entry in settings.actions for name, _, action in [entry.partition(":")] if name in (kind, "all")}
    return [action for action in (*TELLS, *ACTS) if action in wanted]


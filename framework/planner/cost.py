"""How long a step will take: products, memory, messages, the pipeline's bubble, the update. Seconds, from the settings alone.

A micro-batch takes `fixed + micro x sample` seconds in every part, so a search multiplies instead of counting again. A product of
matrices of FLOP f with t tokens and a smaller dimension d takes f / rate x (1 + half / t + half / d): rates saturate.
A ring of n passes 2 (n - 1)/n of the bytes of a sum by each rank, (n - 1)/n of a gather or scattering sum (Thakur et al. 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from framework.config.schema import Config
from framework.planner.activations import ACCELERATOR, CPU, FLOAT, Kernels
from framework.planner.hardware import Link, Site
from framework.planner.partition import Bounds
from framework.planner.states import Rank, alike, bounds_of, rank_of, weight
from framework.planner.work import Ring, work_of
from framework.topology.grid import Grid

PARTS = {
    "products": "matrices and attention, what is computed again included",
    "memory": "everything between products, by bytes through memory",
    "tensor": "messages between tensor ranks, beyond what products hide",
    "context": "exchanges between context ranks",
    "pipeline": "hidden states between stages",
    "bubble": "pipeline stages that wait: filling, emptying, and for the slowest",
    "data": "gradients and weights between data ranks, beyond what is hidden",
    "update": "clipping, the optimizer, and what offload moves",
    "overhead": "starting operations, and DeepSpeed's hooks",
}
"""Parts of a step, in the order in which they are shown."""
MICRO = ("products", "memory", "tensor", "context", "pipeline", "overhead")
UPDATED = {"adamw": 28, "sgd": 12}
"""Bytes through memory per updated fp32 element: AdamW reads gradient, master and moments and writes the last three."""
CLIPPED = 12
"""The same for the norm (read) and the scaling (read, write) of a gradient."""
MOST_HIDDEN = 0.25
"""Share of a tensor rank's products that stand between the begin and the end of the messages that the code begins early: the
weights' gradients of column-parallel layers, a third of three quarters of them."""


class Line(NamedTuple):
    """Seconds of a micro-batch: `fixed`, and `sample` for each of its samples."""

    fixed: float = 0.0
    sample: float = 0.0

    def of(self, micro: int) -> float:
        return self.fixed + micro * self.sample


@dataclass(frozen=True)
class Pace:
    """A stage's micro-batch by part of MICRO; `whole` is their sum, `forward` of it the forward pass."""

    parts: Mapping[str, Line]
    whole: Line
    forward: float

    @staticmethod
    def of(parts: Mapping[str, Line], forward: float) -> Pace:
        return Pace(parts, Line(sum(line.fixed for line in parts.values()), sum(line.sample for line in parts.values())), forward)


@dataclass(frozen=True)
class Sharing:
    """What ranks that share a state do, in seconds. Per micro-batch: `gather` weights in each pass (ZeRO-3), `reduce` gradients,
    `hooks`, and `sums` of gradients in memory; per step: `reduce_once`, then the `update`, then `publish` weights.
    `hides`: gradients travel while the backward pass goes on, but for the share `tail`, the last bucket of it."""

    gather: float
    reduce: float
    hooks: float
    sums: float
    reduce_once: float
    update: float
    publish: float
    hides: bool
    tail: float


class Stages(NamedTuple):
    """So many pipeline stages that are alike."""

    number: int
    pace: Pace
    sharing: Sharing


def kernels_of(site: Site) -> Kernels:
    """How the device's kernels keep activations."""
    return CPU if site.hardware.shared else ACCELERATOR


def pace_of(config: Config, rank: Rank, site: Site) -> Pace:
    """One micro-batch of a stage, whatever ZeRO does. Samples count, so batch.micro_size does not."""
    work, parallel = work_of(config, rank, kernels_of(site)), config.parallel
    rate, half = site.products(config.precision.dtype), site.hardware.reached.half
    products = Line(work.all / work.tokens * half / rate, (work.all + half * work.slim) / rate)
    tensor = _messages(work.tensor, site.link(1, parallel.tensor))
    if not site.hardware.shared:
        early = min(work.tensor.hidden * tensor.sample, MOST_HIDDEN * products.sample)
        tensor = Line(tensor.fixed, tensor.sample - early)
    parts = {
        "products": products,
        "memory": Line(0.0, work.touched / site.between),
        "tensor": tensor,
        "context": _messages(work.context, site.link(parallel.tensor, parallel.context)),
        "pipeline": _messages(work.pipeline, _next_stage(site, parallel.tensor * rank.sharers)),
        "overhead": Line(work.operations * site.hardware.reached.operator, 0.0),
    }
    return Pace.of(parts, work.forward / work.all)


def _next_stage(site: Site, stride: int) -> Link:
    """From rank to rank: no ring, so each has its own port."""
    host, share = site.hardware.host, site.hardware.reached.links
    link = host.inside if 2 * stride <= site.ranks_per_host else host.across
    return Link(link.bandwidth * share, link.latency)


def _messages(ring: Ring, link: Link) -> Line:
    return Line(ring.count * link.latency, ring.nbytes / link.bandwidth)


def sharing_of(config: Config, rank: Rank, site: Site) -> Sharing:
    """What ZeRO does on a rank (dsconfig.py: gradients travel in fp32; stages 1 and 2 sum whole buckets over all ranks; stage 1 in the
    last micro-batch, stages 2 and 3 in each; BF16_Optimizer, which is bf16 at stage 1, after the backward pass)."""
    zero, half, n = config.zero, config.precision.half_weights, rank.sharers
    link = site.link(config.parallel.tensor, n)
    around, count = (n - 1) / n, rank.count
    tensors, buckets = len(rank.matrices) + len(rank.vectors), math.ceil(count / zero.reduce_bucket_size)
    lag = link.latency if n > 1 else 0.0
    gathered = around * count * weight(config) / link.bandwidth
    reduced = around * count * FLOAT / link.bandwidth
    gather = reduce = once = publish = 0.0
    if zero.stage == 3:
        gather, reduce = gathered + lag * len(rank.matrices), reduced + lag * buckets
    else:
        summed = 2 * reduced + lag * buckets
        reduce, once = (summed, 0.0) if zero.stage == 2 else (0.0, summed)
        publish = gathered + lag * len(rank.groups) if zero.stage > 0 else 0.0
    if zero.offload != "none":  # gradients go to the host as they are ready; at stage 3 the weights' parts come from there
        link_down = site.hardware.host.to_host
        once, reduce = (once, reduce + count / n * FLOAT / link_down) if zero.stage > 1 else (once + count / n * FLOAT / link_down, reduce)
        gather += count / n * weight(config) / link_down if zero.stage == 3 else 0.0
    bf16_optimizer = zero.stage == 1 and half and config.precision.dtype == "bf16"
    return Sharing(
        gather=gather,
        reduce=reduce,
        hooks=tensors * site.hardware.reached.hooks[zero.stage],
        sums=_sums(config, rank, site),
        reduce_once=once,
        update=_update(config, rank, site),
        publish=publish,
        hides=zero.overlap_comm and zero.stage > 0 and not bf16_optimizer and len(rank.bounds) == 1 and not site.hardware.shared,
        tail=min(1.0, zero.reduce_bucket_size / count),
    )


def _sums(config: Config, rank: Rank, site: Site) -> float:
    """Adding a micro-batch's gradients to the sums: read both, write one. Of one fp32 micro-batch there is nothing to add to."""
    if rank.micros == 1 and not config.precision.half_weights:
        return 0.0
    part = rank.count / (rank.sharers if config.zero.stage >= 2 else 1)
    return part * (weight(config) + 2 * FLOAT) / site.bandwidth


def _update(config: Config, rank: Rank, site: Site) -> float:
    zero, count = config.zero, rank.count
    part = count / (rank.sharers if zero.stage > 0 else 1)
    nbytes = UPDATED[config.optimizer.name] + CLIPPED + (weight(config) if config.precision.half_weights else 0)
    nbytes += 2 * FLOAT if config.optimizer.momentum > 0 else 0
    if zero.offload == "none":
        return part * nbytes / site.bandwidth
    host = site.hardware.host
    moved = 0.0 if zero.stage == 3 else part * weight(config) / host.to_host
    return part * nbytes / (host.bandwidth / site.ranks_per_host) + moved


def step(stages: Sequence[Stages], micros: int, micro: int) -> dict[str, float]:
    """Seconds of a step by part of PARTS. The slowest stage sets the pace, and there are as many turns beside the micro-batches as
    there are other stages (Narayanan et al. 2021, section 2.2)."""
    number = sum(stage.number for stage in stages)

    def mean(seconds: Callable[[Stages], float]) -> float:
        return sum(stage.number * seconds(stage) for stage in stages) / number

    found = {part: micros * mean(lambda stage, part=part: stage.pace.parts[part].of(micro)) for part in MICRO}
    found["overhead"] += micros * mean(lambda stage: stage.sharing.hooks)
    found["memory"] += micros * mean(lambda stage: stage.sharing.sums)
    at_the_end = max(_at_the_end(stage.pace, stage.sharing, micro) for stage in stages)
    found["data"] = micros * mean(lambda stage: _exposed(stage.pace, stage.sharing, micro)) + at_the_end
    found["update"] = max(stage.sharing.update for stage in stages)
    whole = whole_step([stage.pace for stage in stages], [stage.sharing for stage in stages], number, micros, micro)
    found["bubble"] = 0.0 if number == 1 else whole - sum(found.values())
    return {part: found[part] for part in PARTS}


def whole_step(paces: Sequence[Pace], sharings: Sequence[Sharing], stages: int, micros: int, micro: int) -> float:
    """Seconds of a step of a pipeline of `stages`, of which the slowest are among those given."""
    turn = end = update = 0.0
    for pace, sharing in zip(paces, sharings, strict=True):
        turn = max(turn, pace.whole.of(micro) + _exposed(pace, sharing, micro) + sharing.hooks + sharing.sums)
        end, update = max(end, _at_the_end(pace, sharing, micro)), max(update, sharing.update)
    return (micros + stages - 1) * turn + end + update


def _exposed(pace: Pace, sharing: Sharing, micro: int) -> float:
    """Seconds of a micro-batch's messages between data ranks that nothing hides."""
    if not sharing.hides:
        return 2 * sharing.gather + sharing.reduce
    busy = pace.whole.of(micro)
    forward, behind = busy * pace.forward, sharing.gather + sharing.reduce
    return max(0.0, sharing.gather - forward) + max(behind - (busy - forward), behind * sharing.tail)


def _at_the_end(pace: Pace, sharing: Sharing, micro: int) -> float:
    """Messages of a step that follow its last forward pass."""
    once = sharing.reduce_once
    if sharing.hides:
        once = max(once - pace.whole.of(micro) * (1 - pace.forward), once * sharing.tail)
    return once + sharing.publish


def seconds(parts: Mapping[str, float]) -> float:
    """Of the whole step."""
    return sum(parts.values())


def estimate(config: Config, grid: Grid, site: Site, bounds: Bounds | None = None) -> dict[str, float]:
    """Seconds of a step by part, of a config that has passed check() on the ranks of `grid`."""
    bounds = bounds or bounds_of(config, grid.pipeline)
    found = [(number, rank_of(config, grid, stage, bounds=bounds)) for stage, number in alike(bounds, config.recompute.every).items()]
    stages = [Stages(number, pace_of(config, rank, site), sharing_of(config, rank, site)) for number, rank in found]
    return step(stages, found[0][1].micros, config.batch.micro)

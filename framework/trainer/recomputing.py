"""recompute=auto: what a probe finds to pay at the first start, and what every later start keeps to."""

from __future__ import annotations

from dataclasses import replace

import torch

from framework.config.schema import Config, Recompute
from framework.parallel.apply import make_model
from framework.parallel.probe import Cost, Probe, choose
from framework.topology.groups import Groups
from framework.topology.random import Streams
from framework.trainer.folder import resolved

RESOLVED = "recompute.modules"
KINDS = ("attention", "core", "mlp", "activation", "ffn_in", "norm")
"""Of those in a block. What the head holds is used at once: recomputing it would not lower the peak."""


def resolve(config: Config, groups: Groups, streams: Streams, device: torch.device) -> Config:
    """`config` with the choice in the place of auto. Every rank calls it: the probe runs on all of them together."""
    if config.recompute.granularity != "auto":
        return config
    kept = resolved(config, groups, RESOLVED)
    modules = tuple(_choose(config, groups, streams, device) if kept is None else kept)
    chosen = Recompute("selective", modules=modules, offload=config.recompute.offload) if modules else Recompute()
    return replace(config, recompute=chosen)


def _choose(config: Config, groups: Groups, streams: Streams, device: torch.device) -> tuple[str, ...]:
    """The first rank's choice, on every rank."""
    small = replace(config, model=replace(config.model, num_layers=1, init_from=None), recompute=Recompute(), compile="none")

    def probe() -> Probe:
        return Probe(config, make_model(small, groups, streams, device, lambda module: None))

    plain = probe()
    times, activations = plain.times(), plain.activations()
    whole = Cost(activations, times.embedding + config.model.num_layers * times.block + times.head)
    costs = {kind: probe().kind(kind) for kind in KINDS}
    settings = config.recompute
    return groups.gather(choose(costs, whole, settings.max_extra_time, settings.min_share))[0]

"""A tiny model on pipeline stages, made as trainer/build.py makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from framework.config.schema import Config, Model, Optimizer
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine
from framework.engine.pipelined import PipelinedEngine
from framework.engine.sharded import DeepSpeedEngine, settler
from framework.parallel.apply import make_model
from framework.parallel.partition import costs, cut
from framework.parallel.pipeline import Cut, assemble
from framework.topology.grid import Grid
from framework.topology.groups import accelerator, connect, make_groups
from framework.topology.random import APART, Streams, seed_training
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.parallel import spread

# As many blocks as the most stages; three is odd for two.
LLAMA = replace(spread.LLAMA, num_layers=4)
GPT2 = replace(spread.GPT2, num_layers=4)


@dataclass(frozen=True)
class Stages(spread.Spread):
    """(data, tensor) ranks of each of `pipeline` stages."""

    pipeline: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()}x{self.pipeline}"

    @property
    def grid(self) -> Grid:
        return Grid(data=self.data, tensor=self.tensor, pipeline=self.pipeline)

    def config(self, form: Form, model: Model, optimizer: Optimizer, clip: float = 0.0) -> Config:
        config = super().config(form, model, optimizer, clip)
        return replace(config, parallel=replace(config.parallel, pipeline=self.pipeline))


def engine_of(config: Config, stages: Stages, rank: int) -> DeepSpeedEngine:
    """An engine on this rank; biases are those of tiny.transformer."""
    connect(60.0, shm_comm=False)
    groups = make_groups(stages.grid, rank, 60.0)
    streams = Streams(accelerator(), [APART] if stages.tensor > 1 else [])
    settings = deepspeed_config(config, stages.data, stages.layout.accumulation)
    settle, plain = settler(config, settings, groups), dict(tiny.transformer(config.model).named_parameters())

    def with_biases(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if name == "bias":
                logical = parameter.logical  # type: ignore[attr-defined]
                parameter.data.copy_(spread.part(plain[logical.name].detach(), logical))
        settle(module)

    own = None
    if stages.pipeline > 1:
        own = Cut(tuple(cut(costs(config.model, "parameters"), stages.pipeline)), groups.place.pipeline)
    module = make_model(config, groups, streams, torch.device("cpu"), with_biases, own)
    seed_training(config.seed, groups.place, streams)
    if own is None:
        return DeepSpeedEngine(module, config, settings, groups)
    return PipelinedEngine(
        assemble(module, own, stages.grid, stages.tensor if stages.sequence else 1), own.bounds, config, settings, groups
    )


def plain_of(config: Config) -> PlainEngine:
    """The oracle: the same model on one process."""
    return PlainEngine(tiny.transformer(config.model), config)


def held(engine: DeepSpeedEngine | PlainEngine, tensors: dict[str, torch.Tensor]) -> spread.Held:
    """Tensors by parameter name, with where they belong."""
    module = engine.model if isinstance(engine, PlainEngine) else engine.engine.module
    return {name: (parameter.logical, tensors[name]) for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]


def masters(engine: DeepSpeedEngine | PlainEngine) -> spread.Held:
    return held(engine, tiny.masters(engine))


def live(engine: DeepSpeedEngine | PlainEngine) -> spread.Held:
    return held(engine, tiny.live_weights(engine))

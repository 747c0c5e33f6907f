"""A tiny model spread over a grid of ranks, and what all ranks hold put together again, independently of framework/checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from framework.checkpoint.shards import Logical
from framework.config.schema import Batch, Config, Model, Optimizer, Parallel, Schedule
from framework.data.pack import MicroBatch
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine
from framework.engine.pipelined import PipelinedEngine
from framework.engine.sharded import DeepSpeedEngine, settler
from framework.parallel.apply import make_model
from framework.parallel.pipeline import Cut, assemble
from framework.planner.partition import costs, cut
from framework.topology.grid import Grid, Place
from framework.topology.groups import accelerator, connect, make_groups
from framework.topology.random import APART, Streams, seed_training
from tests.engine import tiny
from tests.engine.tiny import Form

# Heads for four ranks; 31 rows of the vocabulary leave padding on the last of two and of four.
LLAMA = Model(hidden_size=16, num_layers=2, num_heads=4, ffn_hidden_size=20, vocab_size=31, max_positions=16)
GROUPED = replace(LLAMA, num_kv_heads=2)
GPT2 = replace(LLAMA, norm="layernorm", position="learned", mlp="gelu", bias=True, tie_embeddings=False)
SAMPLES, SEQUENCE = 8, 8
ADAMW = Optimizer(lr=1e-3)  # AdamW magnifies rounding: a step of lr whatever the gradient's size


@dataclass(frozen=True)
class Spread:
    """(data, tensor, context) ranks of each of `pipeline` stages, with or without sequence parallel."""

    data: int
    tensor: int
    sequence: bool = False
    pipeline: int = 1
    context: int = 1

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}{'s' if self.sequence else ''}x{self.pipeline}x{self.context}"

    @property
    def grid(self) -> Grid:
        return Grid(data=self.data, tensor=self.tensor, pipeline=self.pipeline, context=self.context)

    @property
    def layout(self) -> tiny.Layout:
        """The samples' share of a data rank: micro-batches of two."""
        return tiny.Layout(self.data, SAMPLES // (2 * self.data), 2)

    def sliced(self, share: Iterable[MicroBatch], place: Place) -> list[MicroBatch]:
        """Of whole sequences what one context rank reads."""
        own = lambda whole: whole.chunk(self.context, dim=1)[place.context]  # noqa: E731
        return [replace(micro, ids=own(micro.ids), targets=own(micro.targets)) for micro in share]

    def share(self, batch: Sequence[tuple[Tensor, Tensor]], place: Place) -> list[MicroBatch]:
        """What the rank at `place` reads of a global batch."""
        return self.sliced(self.layout.share(batch, place.data), place)

    def config(self, form: Form, model: Model, optimizer: Optimizer, clip: float = 0.0) -> Config:
        return Config(
            model=model,
            optimizer=optimizer,
            schedule=Schedule(name="constant"),
            clip_grad_norm=clip,
            precision=tiny.precision_of(form.precision),
            zero=tiny.zero_of(form.stage, form.offload),
            batch=Batch(SAMPLES, 2),
            parallel=Parallel(tensor=self.tensor, sequence=self.sequence, pipeline=self.pipeline, context=self.context),
            seed=1,
        )


def streams_of(spread: Spread) -> Streams:
    return Streams(accelerator(), [APART] if spread.tensor > 1 else [])


def engine_of(config: Config, spread: Spread, rank: int, streams: Streams | None = None) -> DeepSpeedEngine:
    """An engine on this rank, made as trainer/build.py makes it; biases are those of tiny.transformer."""
    connect(60.0, shm_comm=False)
    groups = make_groups(spread.grid, rank, 60.0)
    streams = streams_of(spread) if streams is None else streams
    settings = deepspeed_config(config, spread.data * spread.context, spread.layout.accumulation)
    settle, plain = settler(config, settings, groups), dict(tiny.transformer(config.model).named_parameters())

    def with_biases(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if name == "bias":
                parameter.data.copy_(part(plain[parameter.logical.name].detach(), parameter.logical))  # type: ignore[attr-defined]
        settle(module)

    own = None
    if spread.pipeline > 1:
        own = Cut(tuple(cut(costs(config.model, "parameters"), spread.pipeline)), groups.place.pipeline)
    module = make_model(config, groups, streams, torch.device("cpu"), with_biases, own)
    seed_training(config.seed, groups.place, streams)
    if own is None:
        return DeepSpeedEngine(module, config, settings, groups)
    stage = assemble(module, own, spread.grid, spread.tensor if spread.sequence else 1)
    return PipelinedEngine(stage, own.bounds, config, settings, groups)


def part(whole: Tensor, logical: Logical) -> Tensor:
    """The box of a whole tensor; rows beyond it are 0."""
    found = torch.zeros(logical.size, dtype=whole.dtype)
    cut = whole[tuple(slice(start, start + size) for start, size in zip(logical.offset, logical.size, strict=True))]
    found[tuple(slice(0, size) for size in cut.shape)] = cut
    return found


Held = dict[str, tuple[Logical, Tensor]]


def held(engine: DeepSpeedEngine | PlainEngine, tensors: Mapping[str, Tensor]) -> Held:
    """Tensors by parameter name, with where they belong."""
    module = engine.model if isinstance(engine, PlainEngine) else engine.engine.module
    return {name: (parameter.logical, tensors[name]) for name, parameter in module.named_parameters()}  # type: ignore[attr-defined]


def relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def without_key_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their true gradient is 0: AdamW makes a step of rounding."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}


def whole(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Whole tensors from what all ranks hold. Fails unless what two ranks hold of one element is equal bit for bit."""
    found: dict[str, Tensor] = {}
    for logical, tensor in (entry for rank in ranks for entry in rank.values()):
        target = found.setdefault(logical.name, torch.full(logical.shape, torch.nan, dtype=tensor.dtype))
        box = tuple(slice(start, start + size) for start, size in zip(logical.offset, logical.size, strict=True))
        there = target[box]
        inside = tensor[tuple(slice(0, size) for size in there.shape)]
        assert bool((tensor[there.shape[0] :] == 0).all()), f"padding of {logical.name} is not 0"
        assert bool((there.isnan() | (there == inside)).all()), f"ranks hold different values of {logical.name}"
        target[box] = inside
    assert not any(bool(tensor.isnan().any()) for tensor in found.values())
    return found

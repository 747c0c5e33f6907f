"""engine/state.py on real engines: a State that is put into a fresh process goes on bit for bit, under any ZeRO stage and precision.

The kept tensors travel as whole logical tensors, assembled here without checkpoint/, so that a wrong name, offset or share shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.checkpoint.state import dtype_name
from framework.config import parameters
from framework.config.schema import Batch, Config, Model, Optimizer, Precision, Zero
from framework.data.stream import MicroBatch
from framework.engine import state
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine, StepOut, trained_tokens
from framework.engine.sharded import DeepSpeedEngine
from framework.model.init import initialise
from framework.model.transformer import Transformer
from framework.topology.grid import Grid
from framework.topology.groups import connect, make_groups
from framework.topology.random import seed_training
from tests.ranks import run_ranks

# Odd sizes, so that parts end inside rows and the last ones are padded; stage 3 keeps the vectors gathered and the matrices not.
MODEL = Model(
    hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=20, vocab_size=31, max_positions=16, bias=True, dropout=0.1
)
ACCUMULATION, MICRO_SIZE, SEQUENCE = 2, 2, 8

Logicals = dict[tuple[str, str], Tensor]


def config(precision: str, stage: int, offload: str = "none", engine: str = "deepspeed") -> Config:
    dtype, _, autocast = precision.partition("_")
    return Config(
        engine=engine,  # type: ignore[arg-type]
        model=MODEL,
        batch=Batch(global_size=0, micro_size=MICRO_SIZE),
        optimizer=Optimizer(lr=1e-2),
        # fp16 begins far too high, so that steps are skipped, and doubles every other step.
        precision=Precision(dtype=dtype, autocast=bool(autocast), initial_scale_power=19, hysteresis=1, scale_window=2),  # type: ignore[arg-type]
        zero=Zero(stage=stage, offload=offload, persistence_threshold=13, reduce_bucket_size=500, allgather_bucket_size=500),  # type: ignore[arg-type]
    )


FAST = [config("fp32", 0), config("fp32", 3), config("bf16", 1), config("fp16", 2)]
SLOW = [
    *(config("fp32", stage) for stage in (1, 2)),
    *(config("bf16", stage) for stage in (2, 3)),
    *(config("fp16", stage) for stage in (1, 3)),
    *(config("bf16_autocast", stage) for stage in (0, 1, 2, 3)),
    config("fp16_autocast", 0),
    *(config(precision, stage, "cpu") for precision in ("fp32", "bf16") for stage in (2, 3)),
]


def title(case: Config) -> str:
    precision = case.precision.dtype + "_autocast" * case.precision.autocast
    return f"{case.engine}-{precision}-stage{case.zero.stage}-offload_{case.zero.offload}-{case.optimizer.name}"


# ---------------------------------------------------------------- in the ranks


@dataclass
class Kept:
    """What one rank has kept after the first steps."""

    collected: list[tuple[str, str, int, Tensor]]  # kind, name, start, elements
    counters: str
    generator: Tensor


@dataclass
class Trail:
    """What can be seen of a stretch of training on one rank."""

    steps: list[StepOut]
    hashes: dict[str, str]
    counters: dict[str, Any]


def build(case: Config, rank: int, ranks: int, seed: int, frozen: tuple[str, ...] = ()) -> DeepSpeedEngine | PlainEngine:
    model = Transformer(case.model)
    initialise(model, case.model, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    state.tag(model)
    if case.engine == "plain":
        return PlainEngine(model, case)
    connect(60.0, shm_comm=False)
    groups = make_groups(Grid(data=ranks), rank, 60.0)
    return DeepSpeedEngine(model, case, deepspeed_config(case, ranks, ACCUMULATION), groups.data)


def train(engine: DeepSpeedEngine | PlainEngine, numbers: Iterable[int], rank: int, ranks: int) -> Trail:
    outs = []
    for number in numbers:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tokens = [torch.randint(MODEL.vocab_size, (MICRO_SIZE, SEQUENCE + 1), generator=generator) for _ in range(ACCUMULATION)]
        batch = [MicroBatch(one[:, :-1], one[:, 1:], torch.arange(MICRO_SIZE)) for one in tokens]
        outs.append(engine.step(batch, trained_tokens(batch) * ranks))
    return Trail(outs, state.tensor_hashes(engine), state.counters(engine))


def keep(engine: DeepSpeedEngine | PlainEngine) -> Kept:
    pairs = state.collect(engine)
    flat = [(shard.kind, shard.logical.name, shard.start, tensor.clone()) for shard, tensor in pairs]
    assert all(shard.length == tensor.numel() and shard.dtype == dtype_name(tensor.dtype) for shard, tensor in pairs)
    return Kept(flat, json.dumps(state.counters(engine)), torch.get_rng_state())


def straight(rank: int, ranks: int, case: Config, frozen: tuple[str, ...]) -> tuple[Trail, Kept, Trail]:
    engine = build(case, rank, ranks, seed=1, frozen=frozen)
    seed_training(1, rank)
    before = train(engine, range(3), rank, ranks)
    kept = keep(engine)
    return before, kept, train(engine, range(3, 6), rank, ranks)


def resumed(rank: int, ranks: int, case: Config, frozen: tuple[str, ...], logicals: Logicals, kept: list[Kept]) -> tuple[Trail, Trail]:
    # Another seed: what is not restored is different.
    engine = build(case, rank, ranks, seed=2, frozen=frozen)
    state.restore(engine, partial(fill, logicals), json.loads(kept[rank].counters))
    begun = train(engine, [], rank, ranks)
    torch.set_rng_state(kept[rank].generator)
    return begun, train(engine, range(3, 6), rank, ranks)


def resharded(rank: int, ranks: int, case: Config, logicals: Logicals, counters: str) -> tuple[Kept, Trail]:
    engine = build(case, rank, ranks, seed=2)
    state.restore(engine, partial(fill, logicals), json.loads(counters))
    return keep(engine), train(engine, range(3, 5), rank, ranks)


def fill(logicals: Logicals, wanted: state.Collected) -> None:
    for shard, tensor in wanted:
        tensor.copy_(logicals[shard.kind, shard.logical.name][shard.start : shard.start + shard.length])


# ---------------------------------------------------------------- around them


def assemble(kept: list[Kept]) -> Logicals:
    """Whole flat tensors by (kind, name); fails unless every element was collected exactly once over all ranks."""
    sizes = {name: parameter.numel() for name, parameter in Transformer(MODEL).named_parameters()}
    logicals: Logicals = {}
    counts: dict[tuple[str, str], Tensor] = {}
    for kind, name, start, tensor in (piece for rank in kept for piece in rank.collected):
        whole = logicals.setdefault((kind, name), torch.zeros(sizes[name], dtype=tensor.dtype))
        count = counts.setdefault((kind, name), torch.zeros(sizes[name], dtype=torch.int64))
        whole[start : start + tensor.numel()] = tensor
        count[start : start + tensor.numel()] += 1
    assert {key for key, count in counts.items() if not bool((count == 1).all())} == set()
    return logicals


def goes_on_bit_for_bit(case: Config, ranks: int, frozen: tuple[str, ...] = ()) -> tuple[list[Trail], Logicals]:
    results = run_ranks(straight, ranks, case, frozen, timeout=300)
    before, kept, after = (list(column) for column in zip(*results, strict=True))
    logicals = assemble(kept)
    again = run_ranks(resumed, ranks, case, frozen, logicals, kept, timeout=300)
    for rank, (begun, onward) in enumerate(again):
        assert begun.hashes == before[rank].hashes
        assert begun.counters == before[rank].counters
        assert onward.steps == after[rank].steps
        assert onward.hashes == after[rank].hashes
        assert onward.counters == after[rank].counters
    return before, logicals


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=title)
def test_a_restored_engine_goes_on_bit_for_bit(case: Config) -> None:
    before, logicals = goes_on_bit_for_bit(case, 2)
    names = {entry.name for entry in parameters.table(MODEL) if entry.tied_to is None}
    assert set(logicals) == {(kind, name) for kind in ("master", "exp_avg", "exp_avg_sq") for name in names}
    assert all(tensor.dtype == torch.float32 for tensor in logicals.values())
    assert all(trail.counters["applied"] == trail.counters["optimizer_step"] > 0 for trail in before)
    if case.precision.dtype == "fp16":
        assert any(step.skipped for step in before[0].steps)

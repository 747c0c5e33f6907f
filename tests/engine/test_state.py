"""engine/state.py on real engines: a State that is put into a fresh process goes on bit for bit, under any ZeRO stage and precision.

The kept tensors travel as whole logical tensors, assembled here without checkpoint/, so that a wrong name, offset or share shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.checkpoint.state import dtype_name
from framework.config import parameters
from framework.config.schema import Batch, Config, Model, Optimizer, Precision, Zero
from framework.data.pack import MicroBatch
from framework.engine import state
from framework.engine.dsconfig import deepspeed_config
from framework.engine.engine import PlainEngine, StepOut, trained_tokens
from framework.engine.sharded import DeepSpeedEngine
from framework.model.init import initialise
from framework.model.transformer import Transformer
from framework.topology.grid import Grid, Place
from framework.topology.groups import connect, make_groups
from framework.topology.random import Streams, seed_training
from tests.ranks import run_ranks

# Odd sizes, so that parts end inside rows and the last ones are padded; stage 3 keeps the shorter vectors gathered and nothing else.
MODEL = Model(
    hidden_size=13, head_dim=6, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=21, vocab_size=31, bias=True, dropout=0.1
)
GLOBAL_SIZE, MICRO_SIZE, SEQUENCE = 8, 2, 8

Logicals = dict[tuple[str, str], Tensor]


def config(precision: str, stage: int, offload: str = "none", engine: str = "deepspeed") -> Config:
    dtype, _, autocast = precision.partition("_")
    return Config(
        engine=engine,  # type: ignore[arg-type]
        model=MODEL,
        batch=Batch(global_size=GLOBAL_SIZE, micro_size=MICRO_SIZE),
        optimizer=Optimizer(lr=1e-2),
        # fp16 begins too high, so that steps are skipped, and doubles after every other clean step.
        precision=Precision(dtype=dtype, autocast=bool(autocast), initial_scale_power=18, hysteresis=2, scale_window=2),  # type: ignore[arg-type]
        zero=Zero(stage=stage, offload=offload, persistence_threshold=14, reduce_bucket_size=500, allgather_bucket_size=500),  # type: ignore[arg-type]
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
    tensors: dict[str, str]
    hashes: dict[str, str]
    counters: dict[str, Any]


def build(case: Config, rank: int, ranks: int, seed: int, frozen: tuple[str, ...] = ()) -> DeepSpeedEngine | PlainEngine:
    model = Transformer(case.model)
    initialise(model, case.model, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if case.engine == "plain":
        return PlainEngine(model, case)
    if not torch.distributed.is_initialized():
        connect(60.0, shm_comm=False)
    groups = make_groups(Grid(data=ranks), rank, 60.0)
    accumulation = case.batch.global_size // (MICRO_SIZE * ranks)
    return DeepSpeedEngine(model, case, deepspeed_config(case, ranks, accumulation), groups)


def train(engine: DeepSpeedEngine | PlainEngine, numbers: Iterable[int], rank: int, ranks: int) -> Trail:
    accumulation = engine.config.batch.global_size // (MICRO_SIZE * ranks)
    outs = []
    for number in numbers:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tokens = [torch.randint(MODEL.vocab_size, (MICRO_SIZE, SEQUENCE + 1), generator=generator) for _ in range(accumulation)]
        batch = [MicroBatch(one[:, :-1], one[:, 1:], torch.arange(MICRO_SIZE)) for one in tokens]
        outs.append(engine.step(batch, trained_tokens(batch) * ranks))
    return Trail(outs, state.tensor_hashes(engine), state.hashes(engine), state.counters(engine))


def keep(engine: DeepSpeedEngine | PlainEngine) -> Kept:
    pairs = state.collect(engine)
    flat = [(shard.kind, shard.logical.name, shard.start, tensor.clone()) for shard, tensor in pairs]
    assert all(shard.length == tensor.numel() and shard.dtype == dtype_name(tensor.dtype) for shard, tensor in pairs)
    return Kept(flat, json.dumps(state.counters(engine)), torch.get_rng_state())


def straight(rank: int, ranks: int, case: Config, frozen: tuple[str, ...]) -> tuple[Trail, Kept, Trail]:
    engine = build(case, rank, ranks, seed=1, frozen=frozen)
    seed_training(1, Place(0, rank, 0, 0), Streams(torch))
    before, kept, views = train(engine, range(3), rank, ranks), keep(engine), state.collect(engine)
    after = train(engine, range(3, 6), rank, ranks)
    # The views are of live memory: they have followed the updates.
    assert all(torch.equal(old, new) for (_, old), (_, new) in zip(views, state.collect(engine), strict=True))
    return before, kept, after


def resumed(rank: int, ranks: int, case: Config, frozen: tuple[str, ...], logicals: Logicals, kept: list[Kept]) -> tuple[Trail, Trail]:
    engine = build(case, rank, ranks, seed=2, frozen=frozen)  # of another seed, so that what is not restored is different
    state.restore(engine, partial(fill, logicals), json.loads(kept[rank].counters))
    begun = train(engine, [], rank, ranks)
    torch.set_rng_state(kept[rank].generator)
    return begun, train(engine, range(3, 6), rank, ranks)


def saved_under(rank: int, ranks: int, cases: list[Config]) -> list[Kept]:
    """After three steps under each layout, from weights of its own."""
    kept = []
    for number, case in enumerate(cases):
        engine = build(case, rank, ranks, seed=10 * ranks + number)
        train(engine, range(3), rank, ranks)
        kept.append(keep(engine))
    return kept


def loaded_under(rank: int, ranks: int, cases: list[Config], saved: list[tuple[Logicals, str]]) -> list[list[Kept]]:
    """What each layout collects again after each of the saved States was put into it, and a step from the last of them."""
    found = []
    for case in cases:
        engine, again = build(case, rank, ranks, seed=2), []
        for logicals, counters in saved:
            state.restore(engine, partial(fill, logicals), json.loads(counters))
            assert stale(engine, logicals) == []
            again.append(keep(engine))
        begun, (out,) = state.counters(engine), train(engine, [3], rank, ranks).steps
        expected = {name: begun[name] + 1 for name in ("applied", "optimizer_step")}
        assert {name: state.counters(engine)[name] for name in expected} == expected
        assert not out.skipped
        found.append(again)
    return found


def stale(engine: DeepSpeedEngine | PlainEngine, logicals: Logicals) -> list[str]:
    """Names of the weights that are whole in this rank's memory, as the forward pass will read them, and are not the masters."""
    assert isinstance(engine, DeepSpeedEngine)
    whole = {name: weight.detach().flatten() for name, weight in engine.engine.module.named_parameters() if weight.numel()}
    assert "final_norm.weight" in whole
    return [name for name, weight in whole.items() if not torch.equal(weight, logicals["master", name])]


def fill(logicals: Logicals, wanted: state.Collected) -> None:
    for shard, tensor in wanted:
        tensor.copy_(logicals[shard.kind, shard.logical.name][shard.start : shard.start + shard.length])


# ---------------------------------------------------------------- around them


def assemble(kept: Iterable[Kept]) -> Logicals:
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


def in_this_process(function: Callable[..., Any], _: int, *args: Any) -> list[Any]:
    return [function(0, 1, *args)]


def goes_on_bit_for_bit(case: Config, frozen: tuple[str, ...] = ()) -> tuple[list[Trail], Logicals]:
    """Three steps, a fresh process, three steps: losses, norms, hashes and counters of the straight run, on every rank."""
    start = in_this_process if case.engine == "plain" else partial(run_ranks, timeout=300)
    results = start(straight, 2, case, frozen)
    before, kept, after = (list(column) for column in zip(*results, strict=True))
    logicals = assemble(kept)
    again = start(resumed, 2, case, frozen, logicals, kept)
    for rank, (begun, onward) in enumerate(again):
        assert onward.steps == after[rank].steps
        assert (begun.tensors, begun.hashes, begun.counters) == (before[rank].tensors, before[rank].hashes, before[rank].counters)
        assert (onward.tensors, onward.hashes, onward.counters) == (after[rank].tensors, after[rank].hashes, after[rank].counters)
    assert before[0].hashes["weights"] != after[0].hashes["weights"]
    assert before[0].hashes["optimizer"] != after[0].hashes["optimizer"]
    return before, logicals


TRAINED = {entry.name for entry in parameters.table(MODEL) if entry.tied_to is None}
ADAMW = ("master", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=title)
def test_a_restored_engine_goes_on_bit_for_bit(case: Config) -> None:
    before, logicals = goes_on_bit_for_bit(case)
    assert set(logicals) == {(kind, name) for kind in ADAMW for name in TRAINED}
    # 12 bytes for each trained parameter over all ranks
    assert sum(tensor.nbytes for tensor in logicals.values()) == 12 * parameters.count(MODEL)
    assert all(trail.counters["applied"] == trail.counters["optimizer_step"] > 0 for trail in before)
    assert (case.precision.dtype == "fp16") == any(step.skipped for step in before[0].steps)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "momentum"), [(0, 0.9), (2, 0.9), (3, 0.9), (1, 0.0)])
def test_sgd_goes_on_bit_for_bit(stage: int, momentum: float) -> None:
    case = replace(config("fp32", stage), optimizer=Optimizer(name="sgd", lr=0.1, momentum=momentum))
    _, logicals = goes_on_bit_for_bit(case)
    assert {kind for kind, _ in logicals} == ({"master", "momentum"} if momentum else {"master"})


FROZEN = ("embed_tokens.weight", "layers.0.attention.q_proj.weight", "layers.0.attention.q_proj.bias")


@pytest.mark.slow
@pytest.mark.parametrize("case", [config("fp32", 0), config("bf16", 1), config("bf16", 2), config("bf16", 3)], ids=title)
def test_frozen_parameters_are_kept_once_as_weights(case: Config) -> None:
    _, logicals = goes_on_bit_for_bit(case, FROZEN)
    kinds = {("weight", name) for name in FROZEN} | {(kind, name) for kind in ADAMW for name in TRAINED - set(FROZEN)}
    assert set(logicals) == kinds
    assert {logicals["weight", name].dtype for name in FROZEN} == {torch.bfloat16 if case.precision.half_weights else torch.float32}


def test_the_plain_engine_goes_on_bit_for_bit() -> None:
    before, _ = goes_on_bit_for_bit(config("fp32", 0, engine="plain"))
    assert before[0].counters == {"applied": 3, "optimizer_step": 3, "scaler": None, "deepspeed": None}


def reshard(stages: list[int], save_ranks: list[int], load_ranks: list[int]) -> int:
    """Save under every (stage, ranks) and load under every (stage, ranks); the number of pairs that were equal bit for bit."""
    cases = [config("fp32", stage) for stage in stages]
    saved = []
    for ranks in save_ranks:
        for kept in zip(*run_ranks(saved_under, ranks, cases, timeout=300), strict=True):
            saved.append((assemble(kept), kept[0].counters))
    pairs = 0
    # Another number of micro-batches in a step than when saving, for each number of ranks.
    cases = [replace(case, batch=Batch(global_size=4 * case.batch.global_size, micro_size=MICRO_SIZE)) for case in cases]
    for ranks in load_ranks:
        for again in zip(*run_ranks(loaded_under, ranks, cases, saved, timeout=300), strict=True):
            for kept, (logicals, counters) in zip(zip(*again, strict=True), saved, strict=True):
                loaded = assemble(kept)
                assert loaded.keys() == logicals.keys()
                assert all(torch.equal(loaded[key], logicals[key]) for key in logicals)
                assert {rank.counters for rank in kept} == {counters}
                pairs += 1
    return pairs


@pytest.mark.slow
def test_a_state_moves_between_stages_and_numbers_of_ranks() -> None:
    assert reshard([2, 3], [1], [2]) == 4


@pytest.mark.slow
def test_a_state_moves_between_all_stages_and_numbers_of_ranks() -> None:
    assert reshard([0, 1, 2, 3], [1, 2, 4], [1, 2, 4]) == 144


# ---------------------------------------------------------------- in this process


def plain() -> PlainEngine:
    engine = build(config("fp32", 0, engine="plain"), 0, 1, seed=1)
    assert isinstance(engine, PlainEngine)
    return engine


def test_tags_are_the_names_and_shapes_of_the_parameter_table() -> None:
    tags = [parameter.logical for parameter in plain().model.parameters()]  # type: ignore[attr-defined]
    entries = {entry.name: entry.shape for entry in parameters.table(MODEL) if entry.tied_to is None}
    assert {tag.name: tag.shape for tag in tags} == entries
    assert all(tag.size == tag.shape and not any(tag.offset) and tag.primary for tag in tags)


def test_a_new_engine_has_moments_of_zero_and_steps_as_if_never_asked() -> None:
    asked, other = plain(), plain()
    moments = [tensor for shard, tensor in state.collect(asked) if shard.kind != "master"]
    assert len(moments) == 2 * len(TRAINED)
    assert not any(bool(tensor.any()) for tensor in moments)
    seed_training(1, Place(0, 0, 0, 0), Streams(torch))
    first = train(asked, range(2), 0, 1)
    seed_training(1, Place(0, 0, 0, 0), Streams(torch))
    assert first == train(other, range(2), 0, 1)


def test_what_another_tensor_rank_writes_is_not_collected_but_is_restored() -> None:
    engine = plain()
    replica = engine.model.get_parameter("final_norm.weight")
    replica.logical = replace(replica.logical, primary=False)  # type: ignore[attr-defined]
    written = {shard.logical.name for shard, _ in state.collect(engine)}
    held = {shard.logical.name for shard, _ in state.collect(engine, complete=True)}
    assert held - written == {"final_norm.weight"}


def test_every_hash_sees_one_changed_element() -> None:
    engine = plain()
    train(engine, [0], 0, 1)
    base, tensors = state.hashes(engine), state.tensor_hashes(engine)
    (view,) = [tensor for shard, tensor in state.collect(engine) if (shard.kind, shard.logical.name) == ("exp_avg", "final_norm.weight")]
    view[3] += 1
    assert {name for name in base if state.hashes(engine)[name] != base[name]} == {"optimizer"}
    assert {name for name in tensors if state.tensor_hashes(engine)[name] != tensors[name]} == {"exp_avg final_norm.weight"}
    engine.applied += 1
    changed = state.hashes(engine)
    view[3] -= 1
    assert state.hashes(engine)["optimizer"] not in (base["optimizer"], changed["optimizer"])

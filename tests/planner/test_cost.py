"""The time of a step: counts by hand, the closed forms of rings and bubbles, and that the parts are the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod

import pytest

from framework.config import parameters
from framework.config.schema import Batch, Config, Data, Model, Parallel, Precision, Recompute, Zero
from framework.planner.activations import ACCELERATOR
from framework.planner.cost import PARTS, Line, Pace, Sharing, Stages, estimate, pace_of, seconds, sharing_of, step, whole_step
from framework.planner.hardware import Site, named
from framework.planner.states import rank_of
from framework.planner.work import Work, model_flop, work_of
from framework.topology.grid import Grid

MODEL = Model(hidden_size=64, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=160, vocab_size=512, max_positions=64)
SITE = Site(named("h100_80gb"), 8)
SEQUENCE = 64
ONE, NOTHING = Grid(), Recompute()


def config_of(grid: Grid = ONE, zero: int = 1, sequence: bool = False, recompute: Recompute = NOTHING, batch: int = 16) -> Config:
    return Config(
        model=MODEL, data=Data(seq_length=SEQUENCE), batch=Batch(batch, 1), precision=Precision("bf16"), zero=Zero(zero),  # type: ignore[arg-type]
        parallel=Parallel(None, grid.tensor, sequence, grid.pipeline, context=grid.context), recompute=recompute,
    )  # fmt: skip


def work(grid: Grid, stage: int = 0, sequence: bool = False, recompute: Recompute = NOTHING) -> Work:
    config = config_of(grid, sequence=sequence, recompute=recompute)
    return work_of(config, rank_of(config, grid, stage), ACCELERATOR)


def elements(block: bool) -> int:
    """Of the matrices that multiply, in the blocks or in the head; an embedding is looked up."""
    table = [entry for entry in parameters.table(MODEL) if len(entry.shape) == 2 and not entry.name.startswith("embed_")]
    return sum(prod(entry.shape) for entry in table if (entry.block is not None) == block)


# ---------------------------------------------------------------- work


def test_products_are_six_flop_per_parameter_and_token_and_half_the_attention() -> None:
    matrices = 2 * (elements(True) + elements(False)) * SEQUENCE
    scores = 4 * SEQUENCE**2 * 64 * 4 / 2  # two products of [seq, seq] and 64 in each of 4 blocks; a causal kernel leaves half out
    assert work(Grid()).forward == matrices + scores
    assert work(Grid()).all == 3 * matrices + 3.5 * scores
    assert model_flop(config_of()) == 3 * (matrices + scores)


@pytest.mark.parametrize("grid", [Grid(tensor=4), Grid(context=4), Grid(pipeline=2, tensor=2)], ids=str)
def test_ranks_share_the_products(grid: Grid) -> None:
    shares = [work(grid, stage).all for stage in range(grid.pipeline)]
    assert sum(shares) * grid.tensor * grid.context == pytest.approx(work(Grid()).all)


def test_what_is_computed_again() -> None:
    """A whole block but for the last product; attention but for its output projection (model/recompute.py)."""
    plain, tokens = work(Grid()).all, SEQUENCE
    core = 2 * tokens * SEQUENCE * 64
    kept = 2 * tokens * 64 * 160
    block = 2 * tokens * elements(True) / 4 + core
    assert work(Grid(), recompute=Recompute("full")).all - plain == pytest.approx(4 * (block - kept))
    assert work(Grid(), recompute=Recompute("full", every=2)).all - plain == pytest.approx(2 * (block - kept))
    projections = 2 * tokens * 64 * (64 + 2 * 32)
    assert work(Grid(), recompute=Recompute("selective", modules=("attention",))).all - plain == pytest.approx(4 * (projections + core))
    assert work(Grid(), recompute=Recompute("selective", modules=("activation",))).all == plain


def test_messages_of_tensor_ranks_are_those_that_the_layers_make() -> None:
    """As tests/bench/parallel.py counts them: each half of a block sums once forward and once backward, so do embedding and head,
    and the loss makes two small ones. A ring passes 2 (n - 1)/n of a sum by each rank. Slicing makes the sums' bytes no more, but
    gathers what a fork has read once more."""
    n, state, blocks = 4, SEQUENCE * 64 * 2, 4
    plain, sliced = work(Grid(tensor=n)).tensor, work(Grid(tensor=n), sequence=True).tensor
    scores = 3 * SEQUENCE * 4
    assert plain.count == 4 * blocks + 2 + 2
    assert plain.nbytes == pytest.approx(2 * (n - 1) / n * ((4 * blocks + 2) * state + scores))
    assert sliced.nbytes - plain.nbytes == pytest.approx((n - 1) / n * 2 * blocks * state)


def test_exchanges_of_context_ranks() -> None:
    n = 4
    ring = work(Grid(context=n)).context
    inward, outward = SEQUENCE // n * (64 + 2 * 32) * 2, SEQUENCE // n * 64 * 2
    assert ring.count == 4 * 4  # of each block one in and one out, forward and backward
    assert ring.nbytes == pytest.approx((n - 1) / n * 4 * 2 * (inward + outward))


def test_stages_hand_on_hidden_states() -> None:
    grid = Grid(pipeline=4)
    assert [work(grid, stage).pipeline.nbytes / (SEQUENCE * 64 * 2) for stage in range(4)] == [2, 4, 4, 2]


# ---------------------------------------------------------------- what data ranks do


def shared(zero: int, n: int, **changes: bool) -> Sharing:
    config = config_of(Grid(data=n), zero)
    config = replace(config, zero=replace(config.zero, **changes))
    return sharing_of(config, rank_of(config, Grid(data=n)), SITE)


def test_zero_moves_what_it_says() -> None:
    n, count, link = 8, parameters.count(MODEL), SITE.link(1, 8)
    ring = (n - 1) / n * count / link.bandwidth
    assert shared(1, n).reduce_once == pytest.approx(2 * 4 * ring + link.latency)  # a sum of fp32
    assert shared(1, n).publish == pytest.approx(2 * ring + 2 * link.latency)  # a gather of bf16, of two groups
    assert shared(2, n).reduce == pytest.approx(2 * 4 * ring + link.latency)  # in every micro-batch
    assert (shared(2, n).reduce_once, shared(1, n).reduce) == (0.0, 0.0)
    assert shared(3, n).reduce == pytest.approx(4 * ring + link.latency)  # a scattering sum
    assert shared(3, n).gather == pytest.approx(2 * ring + link.latency * (4 * 7 + 1))
    assert shared(1, n).update > shared(1, 2 * n).update == pytest.approx(shared(1, n).update / 2)
    assert shared(1, 1).reduce_once == shared(1, 1).publish == 0.0


def test_the_backward_pass_hides_gradients_where_the_engine_lets_it() -> None:
    assert shared(2, 8).hides
    assert not shared(2, 8, overlap_comm=False).hides
    assert not shared(1, 8).hides  # BF16_Optimizer sums when everything has gone backward
    config = config_of(Grid(2, 4))
    assert not sharing_of(config, rank_of(config, Grid(2, 4)), SITE).hides


# ---------------------------------------------------------------- the step


FREE = Sharing(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, hides=False, tail=0.0)


def even(seconds_each: float) -> Pace:
    return Pace.of({part: Line(seconds_each / 6, 0.0) for part in ("products", "memory", "tensor", "context", "pipeline", "overhead")}, 0.3)


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 4), (8, 64)])
def test_the_bubble_of_even_stages(stages: int, micros: int) -> None:
    found = step([Stages(stages, even(1.0), FREE)], micros, 1)
    assert seconds(found) == pytest.approx(micros + stages - 1)
    assert found["bubble"] / seconds(found) == pytest.approx((stages - 1) / (micros + stages - 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    found = step([Stages(3, even(1.0), FREE), Stages(1, even(2.0), FREE)], 8, 1)
    assert seconds(found) == pytest.approx((8 + 3) * 2.0)


def test_gradients_cost_what_sticks_out_of_the_backward_pass() -> None:
    hidden = replace(FREE, reduce=0.5, hides=True, tail=0.1)
    assert whole_step([even(1.0)], [hidden], 1, 10, 1) == pytest.approx(10 * (1 + 0.05))  # 0.7 s backward hide all but the last bucket
    late = replace(hidden, reduce=0.9)
    assert whole_step([even(1.0)], [late], 1, 10, 1) == pytest.approx(10 * (1 + 0.2))
    open_ = replace(late, hides=False)
    assert whole_step([even(1.0)], [open_], 1, 10, 1) == pytest.approx(10 * 1.9)


@pytest.mark.parametrize("grid", [Grid(), Grid(4, 2, 1, 2), Grid(1, 4, 2, 2), Grid(2, 2, 2, 2)], ids=str)
def test_parts_are_the_whole(grid: Grid) -> None:
    config = config_of(grid, batch=32)
    found = estimate(config, grid, SITE)
    ranks = [rank_of(config, grid, stage) for stage in range(grid.pipeline)]
    paces, sharings = [pace_of(config, rank, SITE) for rank in ranks], [sharing_of(config, rank, SITE) for rank in ranks]
    assert tuple(found) == tuple(PARTS)
    assert all(part >= 0 for part in found.values())
    assert seconds(found) == pytest.approx(whole_step(paces, sharings, grid.pipeline, ranks[0].micros, 1))


def test_small_matrices_are_slower() -> None:
    half, rate = SITE.hardware.reached.half, SITE.products("bf16")
    config = config_of()
    line = pace_of(config, rank_of(config, Grid()), SITE).parts["products"]
    least = work(Grid()).all / rate
    assert line.of(1) > least * (1 + half / SEQUENCE + half / 64) > least
    assert line.of(1000) / 1000 < line.of(1)
    assert math.isclose(line.of(2) - line.of(1), line.sample)

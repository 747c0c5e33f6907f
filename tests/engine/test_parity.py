"""ZeRO changes where things are, not what they are: every stage against PlainEngine on one process, same global batch, fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from framework.config.schema import Config, Model, Optimizer, Schedule
from framework.engine.engine import PlainEngine, StepOut
from framework.engine.sharded import DeepSpeedEngine
from framework.topology.grid import Place
from framework.topology.random import Streams, seed_training
from tests.engine import tiny
from tests.engine.tiny import GPT2, LLAMA, Form, Layout
from tests.marks import slow
from tests.ranks import run_ranks

MODELS = {
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tie_embeddings=False),
    "gpt2-tied": replace(GPT2, tie_embeddings=True),
    "gpt2": GPT2,
}
LAYOUTS = {1: Layout(1, 4, 2), 2: Layout(2, 2, 2), 4: Layout(4, 1, 2)}
ALONE = LAYOUTS[1]
SAMPLES, SEQUENCE = 8, 8
SLOW_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)
WARM = Schedule(name="cosine", warmup_steps=5, total_steps=20)
LOUDNESS = 100.0


class Loud(nn.Module):
    """A model whose loss, and so whose gradient, is a hundred times too big."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return LOUDNESS * self.model(ids, targets)


@dataclass
class Push:
    """One SGD step at rate 1 with the loud loss: the logged norm, and the L2 norm of the change of all weights."""

    norm: float
    change: float


@dataclass
class Proof:
    """Everything that one process has seen."""

    initial: dict[str, Tensor]
    logits: Tensor
    steps: list[StepOut]
    weights: dict[str, Tensor]
    evaluated: tuple[float, int]
    mode_and_generator_kept: bool
    clipped: Push
    free: Push


def batches(count: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    return (tiny.samples(step, SAMPLES, SEQUENCE, LLAMA.vocab_size) for step in range(count))


def walk(engine: DeepSpeedEngine | PlainEngine, layout: Layout, rank: int, steps: int) -> list[StepOut]:
    return [engine.step(layout.share(batch, rank), tiny.tokens_of(batch)) for batch in batches(steps)]


def held_out(layout: Layout, rank: int) -> tuple[Tensor, Sequence]:
    batch = tiny.samples(99, SAMPLES, SEQUENCE, LLAMA.vocab_size)
    return torch.stack([ids for ids, _ in batch[:2]]), layout.share(batch, rank)


def evaluate(engine: DeepSpeedEngine | PlainEngine, layout: Layout, rank: int) -> tuple[tuple[float, int], bool]:
    """The evaluation, and whether it left train mode on and torch's random numbers alone."""
    seed_training(1, Place(0, rank, 0, 0), Streams(torch))
    before = torch.get_rng_state()
    evaluated = engine.evaluate(held_out(layout, rank)[1])
    module = engine.model if isinstance(engine, PlainEngine) else engine.engine.module
    modes = {part.training for part in module.modules()}
    return evaluated, modes == {True} and torch.equal(before, torch.get_rng_state())


def push(engine: DeepSpeedEngine | PlainEngine, layout: Layout, rank: int) -> Push:
    before = tiny.masters(engine)
    out = walk(engine, layout, rank, 1)[0]
    after = tiny.masters(engine)
    return Push(out.grad_norm, sum(float((after[name] - before[name]).double().norm() ** 2) for name in before) ** 0.5)


def prove(rank: int, ranks: int, model: Model, stage: int | None) -> Proof:
    """The whole programme on one rank; stage None is PlainEngine."""
    layout = LAYOUTS[ranks]

    def make(config: Config, module: nn.Module) -> DeepSpeedEngine | PlainEngine:
        return PlainEngine(module, config) if stage is None else tiny.sharded(config, layout, rank, module)

    form = Form("fp32", stage or 0)
    adam = make(layout.config(form, model, tiny.ADAMW, WARM, clip=0.5), tiny.transformer(model))
    initial, logits = tiny.live_weights(adam), adam.logits(held_out(layout, rank)[0])
    steps = walk(adam, layout, rank, 20)
    sgd = make(layout.config(form, model, SLOW_SGD), tiny.transformer(model))
    walk(sgd, layout, rank, 5)
    dropping = replace(model, dropout=0.1)
    evaluated, kept = evaluate(make(layout.config(form, dropping), tiny.transformer(dropping)), layout, rank)
    clipped, free = (push(make(layout.config(form, model, clip=clip), Loud(tiny.transformer(model))), layout, rank) for clip in (1.0, 0.0))
    return Proof(initial, logits, steps, tiny.masters(sgd), evaluated, kept, clipped, free)


FAST = [("llama", 0, 2), ("llama", 1, 2), ("llama", 2, 2), ("llama", 3, 2), ("gpt2", 1, 2)]
ALL = [(name, stage, 2) for name in MODELS for stage in tiny.STAGES]
ALL += [(name, stage, ranks) for name in ("llama", "gpt2") for stage in tiny.STAGES for ranks in (1, 4)]


@pytest.fixture(scope="module", params=[*FAST, *(slow(row) for row in ALL if row not in FAST)], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[list[Proof], Proof]:
    """What every rank has seen, and what PlainEngine has."""
    name, stage, ranks = request.param
    return run_ranks(prove, ranks, MODELS[name], stage, env=tiny.ONE_THREAD, timeout=300), prove(0, 1, MODELS[name], None)


def relative(got: float, want: float) -> float:
    return abs(got - want) / abs(want)


def test_initial_weights_and_logits_are_plains_bit_for_bit(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    for proof in ranks:
        assert proof.initial.keys() == alone.initial.keys()
        assert all(torch.equal(proof.initial[name], alone.initial[name]) for name in alone.initial)
        assert torch.equal(proof.logits, alone.logits)


def test_twenty_steps_have_plains_losses_and_norms(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    assert all(proof.steps == ranks[0].steps for proof in ranks)
    assert len(ranks[0].steps) == 20
    for got, want in zip(ranks[0].steps, alone.steps, strict=True):
        assert relative(got.loss, want.loss) < 1e-6
        assert relative(got.grad_norm, want.grad_norm) < 1e-6
        assert (got.lr, got.loss_scale, got.skipped, got.applied) == (want.lr, 1.0, False, want.applied)


def test_weights_after_five_sgd_steps_are_plains(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    assert tiny.distance(alone.weights, alone.initial) > 1e-2  # they have moved
    for proof in ranks:
        assert tiny.distance(proof.weights, alone.weights) < 1e-6


def test_evaluation_is_plains_and_leaves_no_trace(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    for proof in ranks:
        assert proof.evaluated[1] == alone.evaluated[1] == tiny.tokens_of(tiny.samples(99, SAMPLES, SEQUENCE, LLAMA.vocab_size))
        assert relative(proof.evaluated[0], alone.evaluated[0]) < 1e-6
        assert proof.mode_and_generator_kept


def test_clipping_is_by_the_global_norm(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    assert alone.clipped.norm > 10
    for proof in ranks:
        assert proof.clipped.change == pytest.approx(1.0, rel=1e-5)
        assert relative(proof.clipped.norm, alone.clipped.norm) < 1e-6


def test_zero_means_no_clipping(pair: tuple[list[Proof], Proof]) -> None:
    ranks, alone = pair
    for proof in ranks:
        assert relative(proof.free.norm, alone.free.norm) < 1e-6
        assert proof.free.change == pytest.approx(proof.free.norm, rel=1e-5)

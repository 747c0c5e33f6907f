"""Tensor, sequence and context parallel change where things are, not what they are: every grid against PlainEngine on one process, fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.config.schema import Model, Optimizer
from framework.engine.engine import PlainEngine, StepOut
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.marks import slow
from tests.parallel.spread import (
    ADAMW,
    GPT2,
    GROUPED,
    LLAMA,
    SAMPLES,
    SEQUENCE,
    Held,
    Spread,
    engine_of,
    held,
    relative,
    whole,
    without_key_biases,
)  # fmt: skip
from tests.ranks import run_ranks

MODELS = {
    "llama": LLAMA,
    "llama-grouped-untied": replace(GROUPED, tie_embeddings=False),
    "gpt2": GPT2,
    "gpt2-tied": replace(GPT2, tie_embeddings=True),
    "qwen": replace(GROUPED, attention_bias="qkv", qk_norm=True),
}
SLOW_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)
STEPS = 5


@dataclass
class Walk:
    """What one rank has seen under one optimizer."""

    initial: Held
    final: Held
    steps: list[StepOut]


@dataclass
class Proof:
    """What one rank has seen."""

    sgd: Walk
    adam: Walk
    logits: Tensor
    evaluated: tuple[float, int]


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    return [tiny.samples(step, SAMPLES, SEQUENCE, LLAMA.vocab_size) for step in range(STEPS)]


def odd_ids() -> Tensor:
    """A sequence that no number of tensor ranks divides."""
    return torch.arange(7)[None]


def walk(engine: Any, share: Any) -> Walk:
    initial = held(engine, tiny.live_weights(engine))
    steps = [engine.step(share(batch), tiny.tokens_of(batch)) for batch in batches()]
    return Walk(initial, held(engine, tiny.masters(engine)), steps)


def prove(rank: int, ranks: int, model: Model, spread: Spread, stage: int) -> Proof:
    place = spread.grid.place(rank)
    share = lambda batch: spread.share(batch, place)  # noqa: E731
    form = Form("fp32", stage)
    sgd = walk(engine_of(spread.config(form, model, SLOW_SGD), spread, rank), share)
    engine = engine_of(spread.config(form, model, ADAMW, clip=0.5), spread, rank)
    adam = walk(engine, share)
    return Proof(sgd, adam, engine.logits(odd_ids()), engine.evaluate(share(batches()[0])))


@dataclass
class Alone:
    """PlainEngine on one process."""

    initial: dict[str, Tensor]
    sgd: dict[str, Tensor]
    adam: dict[str, Tensor]
    steps: list[StepOut]
    logits: Tensor
    evaluated: tuple[float, int]


def alone(model: Model) -> Alone:
    one = Spread(1, 1)
    made: dict[str, Any] = {}
    for name, config in (("sgd", one.config(Form("fp32", 0), model, SLOW_SGD)), ("adam", one.config(Form("fp32", 0), model, ADAMW, 0.5))):
        engine = PlainEngine(tiny.transformer(model), config)
        made["initial"] = tiny.live_weights(engine)
        made["steps"] = [engine.step(one.layout.share(batch, 0), tiny.tokens_of(batch)) for batch in batches()]
        made[name] = tiny.masters(engine)
    return Alone(**made, logits=engine.logits(odd_ids()), evaluated=engine.evaluate(one.layout.share(batches()[0], 0)))


IN_CONTEXT = [Spread(2, 1, context=2), Spread(1, 2, context=2), Spread(1, 2, True, context=2)]
IN_CONTEXT += [Spread(1, 1, context=4), Spread(1, 1, context=2)]
SPREADS = [*IN_CONTEXT, Spread(2, 2), Spread(2, 2, True), Spread(1, 4), Spread(1, 4, True), Spread(1, 2), Spread(1, 2, True), Spread(4, 1)]
FAST = [("llama", Spread(1, 2), 0), ("gpt2-tied", Spread(1, 2, True), 1)]
FAST += [("llama-grouped-untied", Spread(1, 2, True), 3), ("gpt2", Spread(1, 2), 2)]
FAST += [("gpt2", Spread(1, 1, context=2), 0), ("qwen", Spread(1, 2), 1)]
ALL = [(name, spread, stage) for name in MODELS for spread in SPREADS for stage in tiny.STAGES]
ALL = [row for row in ALL if MODELS[row[0]].kv_heads % row[1].tensor == 0]


def label(row: tuple[str, Spread, int]) -> str:
    return f"{row[0]}-{row[1]}-stage{row[2]}"


@pytest.fixture(scope="module", params=[*FAST, *(slow(row) for row in ALL if row not in FAST)], ids=label)
def pair(request: pytest.FixtureRequest) -> tuple[list[Proof], Alone]:
    name, spread, stage = request.param
    return run_ranks(prove, spread.grid.size, MODELS[name], spread, stage, env=tiny.ONE_THREAD, timeout=300), alone(MODELS[name])


def test_initial_weights_are_plains_bit_for_bit(pair: tuple[list[Proof], Alone]) -> None:
    ranks, plain = pair
    initial = whole(proof.sgd.initial for proof in ranks)
    assert initial.keys() == plain.initial.keys()
    assert all(torch.equal(initial[name], plain.initial[name]) for name in initial)


def test_weights_after_five_sgd_steps_are_plains(pair: tuple[list[Proof], Alone]) -> None:
    ranks, plain = pair
    assert tiny.distance(plain.sgd, plain.initial) > 1e-2  # they have moved
    assert tiny.distance(whole(proof.sgd.final for proof in ranks), plain.sgd) < 1e-6


def test_adamw_has_plains_losses_norms_and_weights(pair: tuple[list[Proof], Alone]) -> None:
    ranks, plain = pair
    assert all(proof.adam.steps == ranks[0].adam.steps for proof in ranks)
    for got, want in zip(ranks[0].adam.steps, plain.steps, strict=True):
        assert relative(got.loss, want.loss) < 1e-6
        assert relative(got.grad_norm, want.grad_norm) < 1e-6
    final = whole(proof.adam.final for proof in ranks)
    assert tiny.distance(without_key_biases(final), without_key_biases(plain.adam)) < 1e-5


def test_logits_and_evaluation_are_plains(pair: tuple[list[Proof], Alone]) -> None:
    ranks, plain = pair
    for proof in ranks:
        assert proof.logits.shape == plain.logits.shape
        assert float((proof.logits - plain.logits).abs().max()) < 1e-4
        assert proof.evaluated[1] == plain.evaluated[1]
        assert relative(proof.evaluated[0], plain.evaluated[0]) < 1e-5


def with_dropout(rank: int, ranks: int, spread: Spread, precision: str, stage: int) -> Walk:
    model = replace(GPT2, dropout=0.2)
    engine = engine_of(spread.config(Form(precision, stage), model, SLOW_SGD), spread, rank)
    return walk(engine, lambda batch: spread.share(batch, spread.grid.place(rank)))


@pytest.mark.parametrize("spread", [slow(Spread(1, 2)), Spread(1, 2, True), Spread(1, 1, context=2)], ids=str)
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 1), ("bf16", 1), slow("bf16_autocast", 0), slow("fp16", 2)])
def test_what_ranks_hold_alike_stays_alike_under_dropout_and_half_precision(spread: Spread, precision: str, stage: int) -> None:
    walks = run_ranks(with_dropout, 2, spread, precision, stage, env=tiny.ONE_THREAD, timeout=120)
    assert walks[0].steps == walks[1].steps
    final, initial = (whole(getattr(one, name) for one in walks) for name in ("final", "initial"))  # fails where ranks differ
    assert all(torch.isfinite(tensor).all() for tensor in final.values())
    assert tiny.distance({n: t.float() for n, t in final.items()}, {n: t.float() for n, t in initial.items()}) > 1e-3


HALF_LOSS = {"bf16": 2e-2, "bf16_autocast": 2e-2, "fp16": 2e-3}
"""Relative: the distance of neighbouring numbers is 2^-8 in bf16 and 2^-11 in fp16; rounding adds up over two blocks and five steps."""


def half(rank: int, ranks: int, spread: Spread, precision: str) -> list[StepOut]:
    stage = 0 if precision.endswith("autocast") else 1
    engine = engine_of(spread.config(Form(precision, stage), LLAMA, ADAMW, clip=0.5), spread, rank)
    return [engine.step(spread.share(batch, spread.grid.place(rank)), tiny.tokens_of(batch)) for batch in batches()]


@pytest.mark.parametrize("spread", [slow(Spread(1, 2)), Spread(1, 2, True), slow(Spread(1, 1, context=2))], ids=str)
@pytest.mark.parametrize("precision", list(HALF_LOSS))
def test_half_precision_stays_near_plain_fp32(spread: Spread, precision: str) -> None:
    plain = alone(LLAMA)
    for steps in run_ranks(half, 2, spread, precision, env=tiny.ONE_THREAD, timeout=120):
        assert not any(out.skipped for out in steps)
        for got, want in zip(steps, plain.steps, strict=True):
            assert relative(got.loss, want.loss) < HALF_LOSS[precision]

"""Pipeline stages change where things are, not what they are: every grid against PlainEngine on one process, fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from framework.config.schema import Config, Model, Optimizer
from framework.data.pack import MicroBatch
from framework.engine.engine import PlainEngine, StepOut, trained_tokens
from framework.engine.sharded import DeepSpeedEngine
from framework.topology.grid import Place
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.marks import slow
from tests.parallel.spread import ADAMW, SAMPLES, SEQUENCE, Held, engine_of, relative, whole, without_key_biases
from tests.parallel.stages import GPT2, LLAMA, Stages, live, masters, plain_of
from tests.ranks import run_ranks

MODELS = {
    "llama": LLAMA,
    "llama-untied": replace(LLAMA, tie_embeddings=False),
    "gpt2": GPT2,
    "gpt2-tied": replace(GPT2, tie_embeddings=True),
}
ALONE = Stages(1, 1, pipeline=1)
SLOW_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9)
STEPS = 5
EMBEDDING = "embed_tokens.weight"

Engine = DeepSpeedEngine | PlainEngine
Share = Callable[[int], list[MicroBatch]]


@dataclass
class Walk:
    """What one rank has seen under one optimizer; `copies` are its embeddings, masters and live weights, after each step."""

    initial: Held
    final: Held
    steps: list[StepOut]
    copies: list[tuple[Held, Held]]


@dataclass
class Seen:
    """What one rank has seen. `uneven` is of micro-batches of different lengths: an evaluation, then a step, then one of the
    usual shape. `kept`: evaluation left train mode on and the random numbers alone."""

    sgd: Walk
    adam: Walk
    logits: Tensor
    evaluated: tuple[float, int]
    uneven: tuple[tuple[float, int], StepOut, StepOut]
    kept: bool


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    return tiny.samples(step, SAMPLES, SEQUENCE, LLAMA.vocab_size)


def shortened(share: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batch n of the global batch without its last 2n tokens (two tensor or context ranks may have to divide what is left)."""
    lengths = [SEQUENCE - 2 * int(micro.indices[0]) // len(micro.indices) for micro in share]
    return [MicroBatch(m.ids[:, :length], m.targets[:, :length], m.indices) for m, length in zip(share, lengths, strict=True)]


def embedding(found: Held) -> Held:
    return {name: entry for name, entry in found.items() if entry[0].name == EMBEDDING}


def walk(engine: Engine, share: Share) -> Walk:
    initial, steps, copies = live(engine), [], []
    for step in range(STEPS):
        steps.append(engine.step(share(step), tiny.tokens_of(batch(step))))
        copies.append((embedding(masters(engine)), embedding(live(engine))))
    return Walk(initial, masters(engine), steps, copies)


def watch(make: Callable[[Config], Engine], configs: Sequence[Config], stages: Stages, place: Place) -> Seen:
    """The whole programme; `configs` are of SGD and AdamW."""
    share = lambda step: stages.share(batch(step), place)  # noqa: E731
    short = lambda step: stages.sliced(shortened(stages.layout.share(batch(step), place.data)), place)  # noqa: E731
    sgd = walk(make(configs[0]), share)
    engine = make(configs[1])
    adam = walk(engine, share)
    before = torch.get_rng_state()
    logits, evaluated = engine.logits(torch.arange(7)[None]), engine.evaluate(share(0))
    module = engine.model if isinstance(engine, PlainEngine) else engine.engine.module
    kept = {part.training for part in module.modules()} == {True} and torch.equal(before, torch.get_rng_state())
    tokens = trained_tokens(shortened(ALONE.layout.share(batch(STEPS), 0)))
    uneven = engine.evaluate(short(0)), engine.step(short(STEPS), tokens)
    return Seen(sgd, adam, logits, evaluated, (*uneven, engine.step(share(6), tiny.tokens_of(batch(6)))), kept)


def prove(rank: int, ranks: int, model: Model, stages: Stages, stage: int) -> Seen:
    place, form = stages.grid.place(rank), Form("fp32", stage)
    configs = stages.config(form, model, SLOW_SGD), stages.config(form, model, ADAMW, clip=0.5)
    return watch(lambda config: engine_of(config, stages, rank), configs, stages, place)


def alone(model: Model) -> Seen:
    form = Form("fp32", 0)
    configs = ALONE.config(form, model, SLOW_SGD), ALONE.config(form, model, ADAMW, clip=0.5)
    return watch(plain_of, configs, ALONE, ALONE.grid.place(0))


GRIDS = [Stages(1, 1), Stages(2, 1), Stages(1, 1, pipeline=4), Stages(1, 2), Stages(1, 2, True), Stages(1, 1, context=2)]
FAST = [("llama", Stages(1, 1), 0), ("gpt2-tied", Stages(1, 1), 1), ("gpt2", Stages(1, 1), 0), ("gpt2-tied", Stages(1, 1, context=2), 1)]
ALL = [(name, stages, stage) for name in MODELS for stages in GRIDS for stage in (0, 1)]


@pytest.fixture(scope="module", params=[*FAST, *(slow(row) for row in ALL if row not in FAST)], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[list[Seen], Seen]:
    """What every rank has seen, and what PlainEngine has."""
    name, stages, stage = request.param
    ranks = run_ranks(prove, stages.grid.size, MODELS[name], stages, stage, env=tiny.ONE_THREAD, timeout=300)
    return ranks, alone(MODELS[name])


def test_initial_weights_are_plains_bit_for_bit(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    initial, wanted = whole(seen.sgd.initial for seen in ranks), whole([plain.sgd.initial])
    assert initial.keys() == wanted.keys()
    assert all(torch.equal(initial[name], wanted[name]) for name in wanted)


def test_every_parameter_is_on_one_stage_but_a_tied_embedding_on_two(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    elements = sum(logical.primary * tensor.numel() for seen in ranks for logical, tensor in seen.sgd.initial.values())
    copies = sum(not logical.primary for seen in ranks for logical, _ in seen.sgd.initial.values() if logical.name == EMBEDDING)
    model_ranks = {len(seen.sgd.initial) for seen in ranks}
    assert elements >= sum(tensor.numel() for _, tensor in plain.sgd.initial.values())
    assert (copies > 0) == ("lm_head.weight" not in plain.sgd.initial)
    assert max(model_ranks) < len(plain.sgd.initial)


def test_weights_after_five_sgd_steps_are_plains(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    wanted = whole([plain.sgd.final])
    assert tiny.distance(wanted, whole([plain.sgd.initial])) > 1e-2  # they have moved
    assert tiny.distance(whole(seen.sgd.final for seen in ranks), wanted) < 1e-6


def test_adamw_has_plains_losses_norms_and_weights(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    assert all(seen.adam.steps == ranks[0].adam.steps for seen in ranks)
    for got, want in zip(ranks[0].adam.steps, plain.adam.steps, strict=True):
        assert relative(got.loss, want.loss) < 1e-6
        assert relative(got.grad_norm, want.grad_norm) < 1e-6
        assert (got.lr, got.skipped, got.applied) == (want.lr, False, want.applied)
    final, wanted = (without_key_biases(whole(walks)) for walks in ((seen.adam.final for seen in ranks), [plain.adam.final]))
    assert tiny.distance(final, wanted) < 1e-5


def test_all_copies_of_the_embedding_are_equal_after_every_step(pair: tuple[list[Seen], Seen]) -> None:
    """`whole` fails unless what two ranks hold of one element is equal bit for bit."""
    for walks in ([seen.sgd for seen in pair[0]], [seen.adam for seen in pair[0]]):
        before = whole(embedding(walk.initial) for walk in walks)[EMBEDDING]
        for step in range(STEPS):
            master, now = (whole(walk.copies[step][side] for walk in walks)[EMBEDDING] for side in (0, 1))
            assert torch.equal(master, now)
            assert not torch.equal(now, before)
            before = now


def test_logits_and_evaluation_are_plains_and_leave_no_trace(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    for seen in ranks:
        assert seen.logits.shape == plain.logits.shape
        assert float((seen.logits - plain.logits).abs().max()) < 1e-4
        assert seen.evaluated[1] == plain.evaluated[1]
        assert relative(seen.evaluated[0], plain.evaluated[0]) < 1e-5
        assert seen.kept


def test_micro_batches_of_unequal_shape(pair: tuple[list[Seen], Seen]) -> None:
    ranks, plain = pair
    for seen in ranks:
        assert seen.uneven[0][1] == plain.uneven[0][1] < plain.evaluated[1]
        assert relative(seen.uneven[0][0], plain.uneven[0][0]) < 1e-5
        for got, want in zip(seen.uneven[1:], plain.uneven[1:], strict=True):
            assert relative(got.loss, want.loss) < 1e-5
            assert relative(got.grad_norm, want.grad_norm) < 1e-5

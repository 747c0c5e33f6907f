"""P02: a setting that saves memory must not change the mathematics.

Recompute in every granularity, with dropout, in every layout: gradients, losses, weights and random numbers are those of a run
without it, bit for bit. AdamW with beta1 = 0 keeps the gradient itself as its first moment, so the moments say whether
the gradients were equal; the first losses alone would not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from framework.config.schema import Optimizer, Recompute
from framework.engine import state
from framework.model.recompute import KINDS, Region
from framework.topology.random import Streams
from tests.engine import tiny
from tests.engine.tiny import Form
from tests.marks import slow
from tests.parallel import stages
from tests.parallel.spread import SAMPLES, SEQUENCE, Spread, engine_of, streams_of
from tests.ranks import run_ranks

MODELS = {
    "llama": replace(stages.LLAMA, dropout=0.1, num_kv_heads=4),
    "gpt2": replace(stages.GPT2, dropout=0.1),
}
GRADIENT_KEEPER = Optimizer(lr=1e-3, beta1=0.0)
STEPS = 5
NONE = Recompute()
GRANULARITIES = {
    "full": Recompute("full"),
    "full offloaded": Recompute("full", offload=True),
    "every_2": Recompute("full", every=2),
    **{kind: Recompute("selective", modules=(kind,)) for kind in KINDS},
    "kinds inside kinds": Recompute("selective", modules=KINDS),
    "by name": Recompute("selective", modules=("layers.1.attention.o_proj", "layers.?.mlp*")),
}


@dataclass(frozen=True)
class Seen:
    """What one rank has seen: after each step the loss, the norm and a hash of its part of masters and moments; at the end its
    random numbers."""

    steps: tuple[tuple[float, float, str], ...]
    random: str


def digest(tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(spread: Spread, form: Form, model: str, recompute: Recompute, rank: int) -> Seen:
    config = replace(spread.config(form, MODELS[model], GRADIENT_KEEPER), recompute=recompute)
    streams, place = streams_of(spread), spread.grid.place(rank)
    engine = engine_of(config, spread, rank, streams)
    steps = []
    for step in range(STEPS):
        batch = tiny.samples(step, SAMPLES, SEQUENCE, MODELS[model].vocab_size)
        out = engine.step(spread.share(batch, place), tiny.tokens_of(batch))
        steps.append((out.loss, out.grad_norm, digest([tensor for _, tensor in state.collect(engine)])))
    return Seen(tuple(steps), digest([torch.get_rng_state(), *(streams.states[name] for name in sorted(streams.states))]))


def walk(rank: int, ranks: int, spread: Spread, form: Form, model: str, names: Sequence[str]) -> dict[str, Seen]:
    wanted = {"none": NONE} | {name: GRANULARITIES[name] for name in names}
    return {name: train(spread, form, model, recompute, rank) for name, recompute in wanted.items()}


def equal_to_none(spread: Spread, form: Form, model: str, names: Sequence[str]) -> None:
    ranks = run_ranks(walk, spread.grid.size, spread, form, model, names, env=tiny.ONE_THREAD, timeout=600)
    different = {name: rank for rank, seen in enumerate(ranks) for name in names if seen[name] != seen["none"]}
    assert different == {}
    for seen in ranks:
        assert len({step[2] for step in seen["none"].steps}) == STEPS  # it has learned something at every step


FP32 = Form("fp32", 0)
SOME = ("full", "every_2", "attention", "activation", "by name")
GRIDS: dict[str, tuple[Spread, list[int]]] = {
    "data 2": (Spread(2, 1), [0, 1, 2, 3]),
    "tensor 2": (Spread(1, 2), [0, 1, 3]),
    "tensor 2, sequence": (Spread(1, 2, True), [0, 2, 3]),
    "context 2": (Spread(1, 1, context=2), [0, 1, 3]),
    "pipeline 2": (stages.Stages(1, 1), [0, 1]),
    "data 2, tensor 2, sequence": (Spread(2, 2, True), [1, 3]),
    "data 2, context 2": (Spread(2, 1, context=2), [2]),
    "tensor 2, context 2": (Spread(1, 2, context=2), [1, 3]),
    "tensor 2, sequence, context 2": (Spread(1, 2, True, context=2), [2]),
    "pipeline 2, tensor 2": (stages.Stages(1, 2), [1]),
    "pipeline 2, tensor 2, sequence": (stages.Stages(1, 2, True), [1]),
    "pipeline 2, context 2": (stages.Stages(1, 1, context=2), [1]),
    "pipeline 2, data 2": (stages.Stages(2, 1), [0]),
    "pipeline 4": (stages.Stages(1, 1, pipeline=4), [1]),
    "tensor 4": (Spread(1, 4), [1]),
    "context 4": (Spread(1, 1, context=4), [3]),
}


@pytest.mark.parametrize("model", MODELS)
def test_every_granularity_is_none_bit_for_bit(model: str) -> None:
    equal_to_none(Spread(1, 1), FP32, model, list(GRANULARITIES))


@pytest.mark.parametrize("grid", [slow("tensor 2, sequence"), "context 2", "pipeline 2"])
def test_so_it_is_on_two_ranks(grid: str) -> None:
    equal_to_none(GRIDS[grid][0], FP32, "gpt2", SOME)


@pytest.mark.slow
def test_so_it_is_where_zero_3_moves_the_weights() -> None:
    equal_to_none(Spread(2, 1), Form("fp32", 3), "llama", list(GRANULARITIES))


@pytest.mark.parametrize("precision", [slow("bf16"), "bf16_autocast", "fp16"])
def test_so_it_is_in_half_precision(precision: str) -> None:
    equal_to_none(Spread(1, 1), Form(precision, 0 if precision.endswith("autocast") else 1), "llama", SOME)


ROWS = [(name, stage) for name, (_, stages_) in GRIDS.items() for stage in stages_]


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "stage", "model"), [(*row, [*MODELS][number % 2]) for number, row in enumerate(ROWS)])
def test_every_granularity_in_every_layout(grid: str, stage: int, model: str) -> None:
    equal_to_none(GRIDS[grid][0], Form("fp32", stage), model, list(GRANULARITIES))


def forgetful(self: Region, *inputs: Any) -> Any:
    """The fault of the report: the second computation draws on."""
    return checkpoint(self.function, *inputs, use_reentrant=False, preserve_rng_state=False)


def with_fault(rank: int, ranks: int, fault: str) -> tuple[Seen, Seen]:
    spread = Spread(1, ranks, sequence=ranks > 1)
    seen = [train(spread, FP32, "llama", NONE, rank)]
    if fault == "default stream":
        Region.__call__ = forgetful  # type: ignore[method-assign]
    else:
        streams = Streams.twice
        Streams.twice = lambda self: (streams(self)[0], streams(self)[0])  # type: ignore[method-assign]
    return seen[0], train(spread, FP32, "llama", GRANULARITIES["full"], rank)


@pytest.mark.parametrize(("fault", "ranks"), [("default stream", 1), ("named streams", 2)])
def test_a_fault_would_be_seen(fault: str, ranks: int) -> None:
    """The loss of step 1 is nearly the same; gradients, later losses and random numbers are not."""
    for none, faulty in run_ranks(with_fault, ranks, fault, env=tiny.ONE_THREAD, timeout=120):
        assert none.steps[0][0] == pytest.approx(faulty.steps[0][0], rel=0.01)
        assert none.steps[0][2] != faulty.steps[0][2]
        assert none.steps[1][0] != faulty.steps[1][0]
        assert none.random != faulty.random

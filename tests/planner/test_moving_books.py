"""Activations on paper against engines at work, in every layout: divided by tensor and context ranks, in flight in a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.config.schema import Config, Model, Recompute
from framework.engine.books import books
from framework.engine.state import module_of
from framework.monitor.memory import SavedActivations
from framework.planner import memory
from framework.planner.activations import CPU
from tests.engine import tiny
from tests.engine.tiny import ONE_THREAD, Form
from tests.memory import LiveBytes
from tests.parallel.spread import ADAMW, GPT2, LLAMA, SAMPLES, Spread, engine_of
from tests.planner.books import CHOICES, kept, starts_of, with_documents_apart
from tests.ranks import run_ranks

DEEP = replace(LLAMA, num_layers=4, hidden_size=32, ffn_hidden_size=80, max_positions=64, num_kv_heads=2)
DEEP_GPT2 = replace(GPT2, num_layers=4, hidden_size=32, ffn_hidden_size=128, max_positions=64)
SEQUENCE = 64


def live_and_paper(rank: int, ranks: int, config: Config, spread: Spread) -> tuple[tuple[int, int], tuple[int, int]]:
    """Activations, and the peak; each measured and on paper."""
    engine = engine_of(config, spread, rank)
    saved, batch = SavedActivations(module_of(engine)), tiny.samples(0, SAMPLES, SEQUENCE, 31)
    share = [replace(micro, starts=starts_of(config)) for micro in spread.share(batch, spread.grid.place(rank))]
    saved.begin()
    engine.step(share, tiny.tokens_of(batch))
    saved.end()
    before = sum(books(engine).values())
    with LiveBytes() as live:
        engine.step(share, tiny.tokens_of(batch))
    paper = memory.predict(config, spread.grid, spread.grid.place(rank).pipeline, kernels=CPU)
    return (kept(saved), paper.device["activations"]), (before + live.peak, paper.peak)


DATA, TENSOR, SLICED, CONTEXT = Spread(2, 1), Spread(1, 2), Spread(1, 2, sequence=True), Spread(1, 1, context=2)
PIPELINE, FOUR = Spread(1, 1, pipeline=2), Spread(1, 1, pipeline=4)
NONE, FULL, HALF, SOME = (CHOICES[name] for name in ("none", "full", "every_2", "attention+activation"))
CASES: list[tuple[Form, Spread, Model, Recompute]] = [
    *((Form("fp32", 0), spread, DEEP, NONE) for spread in (TENSOR, SLICED, CONTEXT, PIPELINE, FOUR)),
    *((Form("fp32", 1), spread, DEEP_GPT2, SOME) for spread in (TENSOR, SLICED, CONTEXT, PIPELINE)),
    *((Form("bf16", 1), spread, DEEP_GPT2, NONE) for spread in (TENSOR, SLICED, CONTEXT, PIPELINE)),
    *((Form("fp32", 3), spread, DEEP, HALF) for spread in (DATA, TENSOR, CONTEXT)),
    *((Form("bf16", 3), spread, DEEP, FULL) for spread in (DATA, SLICED)),
    *((Form("bf16_autocast", 2), spread, DEEP, NONE) for spread in (DATA, TENSOR)),
]
JOINED = len(CASES)
CASES += [
    *((Form("fp32", 0), spread, DEEP, NONE) for spread in (PIPELINE, TENSOR, CONTEXT, FOUR)),
    *((Form("bf16", 1), spread, DEEP, SOME) for spread in (SLICED, CONTEXT, PIPELINE)),
    *((Form("bf16_autocast", 2), *row) for row in ((DATA, DEEP_GPT2, FULL), (SLICED, DEEP, NONE))),
]
"""Those from JOINED on with documents apart."""
FAST = {0, 3, 7, 12, JOINED}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow, id=f"{n}-{case[0]}-{case[1]}") for n, case in enumerate(CASES)]
)
def test_activations_are_within_five_percent_and_the_peak_within_ten(number: int) -> None:
    form, spread, model, choice = CASES[number]
    config = spread.config(form, model, ADAMW, 1.0)
    config = replace(config, recompute=choice, data=replace(config.data, seq_length=SEQUENCE))
    config = with_documents_apart(config) if number >= JOINED else config
    for (live, paper), (peak, paper_peak) in run_ranks(live_and_paper, spread.grid.size, config, spread, timeout=120, env=ONE_THREAD):
        assert paper == pytest.approx(live, rel=0.05)
        assert paper_peak == pytest.approx(peak, rel=0.10)

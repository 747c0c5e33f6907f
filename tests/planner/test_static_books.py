"""Static books on paper against engines at work: equal to the byte, on every rank, in every precision, ZeRO stage and layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.config.schema import Config, Model, Optimizer
from framework.engine.books import Fullest
from framework.planner.ledger import STATIC
from framework.planner.states import rank_of, static
from tests.engine import tiny
from tests.engine.tiny import ONE_THREAD, Form
from tests.parallel.spread import ADAMW, GPT2, LLAMA, SAMPLES, SEQUENCE, Spread, engine_of
from tests.ranks import run_ranks

Books = dict[str, int]
ODD = replace(LLAMA, hidden_size=24, num_heads=3, ffn_hidden_size=19, vocab_size=37)  # parts that are padded, and end inside rows
MOMENTUM = Optimizer(name="sgd", lr=1e-3, momentum=0.9)


def step(engine: object, spread: Spread, rank: int, number: int) -> None:
    batch = tiny.samples(number, SAMPLES, SEQUENCE, 31)
    engine.step(spread.share(batch, spread.grid.place(rank)), tiny.tokens_of(batch))  # type: ignore[attr-defined]


def live_and_paper(rank: int, ranks: int, config: Config, spread: Spread) -> tuple[Books, Books]:
    engine = engine_of(config, spread, rank)
    step(engine, spread, rank, 0)
    live = Fullest(engine)
    live.begin()
    step(engine, spread, rank, 1)
    live.end()
    place = spread.grid.place(rank)
    paper = static(config, rank_of(config, spread.grid, place.pipeline, place.data * spread.context + place.context))
    both = {book: paper.device.get(book, 0) + paper.host.get(book, 0) for book in STATIC}
    return {book: live.most.get(book, 0) for book in STATIC}, both


DATA, FOUR, TENSOR, PIPELINE, CONTEXT = Spread(2, 1), Spread(4, 1), Spread(1, 2), Spread(2, 1, pipeline=2), Spread(1, 1, context=2)
FORMS = [Form(precision, stage) for precision in tiny.PRECISIONS for stage in tiny.STAGES]
FORMS = [form for form in FORMS if form in tiny.allowed_forms(2)]
CASES: list[tuple[Form, Spread, Model, Optimizer]] = [
    *((form, DATA, ODD, ADAMW) for form in FORMS),
    *((Form("fp32", stage), FOUR, GPT2, ADAMW) for stage in (1, 2, 3)),  # one micro-batch a step
    *((Form("fp16", stage), FOUR, GPT2, ADAMW) for stage in (1, 2, 3)),
    *((Form("bf16", stage), Spread(2, 2), GPT2, ADAMW) for stage in (1, 2, 3)),
    *((Form("fp32", stage), Spread(1, 2, sequence=True), LLAMA, MOMENTUM) for stage in tiny.STAGES),
    *((form, PIPELINE, LLAMA, ADAMW) for form in (Form("fp32", 0), Form("fp32", 1), Form("bf16", 1), Form("fp16", 1))),
    *((Form("fp32", stage), CONTEXT, LLAMA, tiny.SGD) for stage in (2, 3)),
    *((Form(precision, stage, "cpu"), DATA, LLAMA, ADAMW) for precision in ("fp32", "bf16") for stage in (1, 2, 3)),
]
FAST = {Form("fp32", 0), Form("fp32", 1), Form("bf16", 1), Form("fp16", 1), Form("bf16", 2), Form("bf16", 3), Form("fp32", 2, "cpu")}


def fast(form: Form, spread: Spread) -> bool:
    return form in FAST and spread.grid.size == 2


@pytest.mark.parametrize(
    ("form", "spread", "model", "optimizer"),
    [pytest.param(*case, marks=() if fast(*case[:2]) else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in CASES],
)
def test_every_static_book_is_predicted_to_the_byte(form: Form, spread: Spread, model: Model, optimizer: Optimizer) -> None:
    config = spread.config(form, model, optimizer, 1.0)
    for live, paper in run_ranks(live_and_paper, spread.grid.size, config, spread, timeout=120, env=ONE_THREAD):
        assert live == paper
        assert live["parameters"] > 0


def test_the_cases_are_enough() -> None:
    assert len(CASES) >= 24

"""Advice: in the order of its cost, accepted by the rules, and worth what it says, by two Ledgers and two estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.config.check import check
from framework.config.compose import compose
from framework.config.schema import Config
from framework.planner import memory
from framework.planner.advice import Judge, Judged
from framework.planner.cost import estimate, kernels_of, seconds
from framework.planner.hardware import SHARE, Site, named
from framework.topology.grid import Grid
from tests.marks import slow

H100 = named("h100_80gb")
ORDER = ("mixed", "recompute", "ZeRO", "offload", "tensor", "pipeline")
TOO_LARGE = ["recipe=llama_8b", "precision=fp32", "zero=stage0"]


def judged(words: list[str], ranks: int, site: Site) -> tuple[Judge, Judged]:
    judge = Judge(ranks, site)
    return judge, judge.judge(compose(words))


def test_savers_come_in_the_order_of_their_cost() -> None:
    judge, now = judged(TOO_LARGE, 16, Site(H100, 8))
    assert now.reason
    kinds = [entry.what.split()[0] for entry in judge.advise(now)]
    assert list(dict.fromkeys(kinds)) == list(ORDER)


def totals(config: Config, grid: Grid, site: Site) -> tuple[int, float]:
    ledgers = [memory.predict(config, grid, stage, kernels=kernels_of(site)) for stage in range(grid.pipeline)]
    return max(ledger.total for ledger in ledgers), seconds(estimate(config, grid, site))


@pytest.mark.parametrize(
    ("words", "ranks", "name"),
    [
        (TOO_LARGE, 16, "h100_80gb"),
        (["recipe=llama2_70b"], 128, "a100_40gb"),
        slow(["recipe=llama2_70b", "recompute=full"], 128, "h100_80gb"),
        (["recipe=gpt2_124m"], 8, "l40s_48gb"),
    ],
)
def test_each_entry_is_worth_what_it_says(words: list[str], ranks: int, name: str) -> None:
    site = Site(named(name), 8)
    judge, now = judged(words, ranks, site)
    nbytes, took = totals(now.config, now.grid, site)
    advice = judge.advise(now)
    assert advice
    for entry in advice:
        then = compose([*words, *entry.write.split()])
        check(then, ranks, 8)
        p = then.parallel
        new_bytes, new_took = totals(then, Grid(p.pipeline, ranks // p.model_ranks, p.context, p.tensor), site)
        assert entry.saves == nbytes - new_bytes
        assert entry.costs == pytest.approx(new_took - took)
        assert entry.fits == (new_bytes <= SHARE * site.memory)
        assert entry.saves > 0 if now.reason else entry.costs < 0


def test_what_fits_and_is_fast_gets_no_advice() -> None:
    judge, now = judged(["recipe=llama_8b"], 64, Site(H100, 8))
    assert not now.reason
    assert judge.advise(now) == []


def test_the_verdict_is_against_four_fifths_of_the_memory() -> None:
    config = compose(["recipe=llama_8b"])
    need = memory.fullest(config, Grid(data=64)).total
    for nbytes, fits in ((need / 0.8 + 10, True), (need / 0.8 - 10, False)):
        site = Site(replace(H100, memory=int(nbytes)), 8)
        assert (Judge(64, site).judge(config).reason == "") == fits


def test_a_cpu_has_nowhere_to_move_anything_to() -> None:
    judge, now = judged(["recipe=llama_1b"], 64, Site(named("auto"), 64))
    assert now.reason
    advice = judge.advise(now)
    assert advice
    assert not any("offload" in entry.what for entry in advice)

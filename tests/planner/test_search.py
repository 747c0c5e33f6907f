"""The search against trying every leaf by itself with check(), the Ledger and the time model; and its size and speed."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from framework.base.errors import ConfigError
from framework.config.check import check
from framework.config.compose import compose
from framework.config.schema import Batch, Config, Data, Model, Precision, Recompute
from framework.planner import memory
from framework.planner.cost import estimate, kernels_of, seconds
from framework.planner.hardware import SHARE, Hardware, Site, named
from framework.planner.search import RECOMPUTES, ZEROS, Layout, Search, describe, grids
from framework.topology.grid import Grid
from tests.marks import slow

MODEL = Model(hidden_size=64, num_layers=6, num_heads=4, num_kv_heads=2, ffn_hidden_size=160, vocab_size=512, max_positions=64)
BASE = Config(model=MODEL, data=Data(seq_length=64), batch=Batch(8, 1), precision=Precision("bf16"))
H100 = named("h100_80gb")


def small(nbytes: int, host: int = 10**9) -> Site:
    hardware: Hardware = replace(H100, memory=nbytes, host=replace(H100.host, memory=host))
    return Site(hardware, 4)


def fits(config: Config, grid: Grid, site: Site) -> bool:
    ledgers = [memory.predict(config, grid, stage, kernels=kernels_of(site)) for stage in range(grid.pipeline)]
    device, host = max(ledger.total for ledger in ledgers), max(sum(ledger.host.values()) for ledger in ledgers)
    return device <= SHARE * site.memory and host <= SHARE * site.host_memory


def by_hand(config: Config, ranks: int, site: Site) -> tuple[dict[Layout, float], int]:
    """Seconds of every leaf that the rules allow and that fits, each by itself; and how many leaves there are."""
    found, number = {}, 0
    degrees = [degree for degree in itertools.product(range(1, ranks + 1), repeat=3) if ranks % (degree[0] * degree[1] * degree[2]) == 0]
    micros = [micro for micro in range(1, config.batch.global_size + 1) if config.batch.global_size % micro == 0]
    for (tensor, pipeline, context), (stage, offload), recompute, micro in itertools.product(degrees, ZEROS, RECOMPUTES, micros):
        grid = Grid(pipeline, ranks // tensor // pipeline // context, context, tensor)
        for sequence in (False, True) if tensor > 1 else (False,):
            number += 1
            layout = Layout(grid, sequence, stage, offload, recompute, micro)
            leaf = layout.of(config)
            try:
                check(leaf, ranks, site.ranks_per_host)
            except ConfigError:
                continue
            if fits(leaf, grid, site):
                found[layout] = seconds(estimate(leaf, grid, site))
    return found, number


@pytest.mark.parametrize(("ranks", "memory_bytes"), [(2, 10**9), (2, 4_000_000), slow(4, 2_500_000)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_it_finds_what_trying_every_leaf_finds(ranks: int, memory_bytes: int, precision: str) -> None:
    config = replace(BASE, precision=Precision(precision))  # type: ignore[arg-type]
    if ranks == 4:
        config = replace(config, batch=Batch(4, 1))
    site = small(memory_bytes)
    expected, number = by_hand(config, ranks, site)
    findings = Search(config, ranks, site).run()
    assert findings.layouts == number
    assert {found.layout: found.seconds for found in findings.found} == pytest.approx(expected)
    assert [found.seconds for found in findings.found] == sorted(found.seconds for found in findings.found)
    if memory_bytes < 10**9:
        assert 0 < len(expected) < len(by_hand(config, ranks, small(10**9))[0])  # the limit bites


def test_the_host_has_a_limit_too() -> None:
    findings = Search(BASE, 2, small(10**9, host=100_000)).run()
    assert findings.found
    assert all(found.layout.offload == "none" for found in findings.found)
    assert any(branch.reason.startswith("host:") for branch in findings.rejected)


def test_every_rejection_has_its_reason() -> None:
    findings = Search(BASE, 4, small(1_500_000)).run()
    assert all(branch.reason for branch in findings.rejected)
    of_pipeline = [branch for branch in findings.rejected if branch.layout.grid.pipeline > 1 and branch.layout.stage > 1]
    assert of_pipeline
    assert all("[pipeline_zero]" in branch.reason for branch in of_pipeline)
    assert any("activations" in branch.reason for branch in findings.rejected)


def test_a_recompute_of_ones_own_is_tried_too() -> None:
    own = Recompute("selective", modules=("mlp",))
    found = Search(replace(BASE, recompute=own), 2, small(10**9)).run().found
    assert any(each.layout.recompute == own for each in found)


def test_grids_are_all_products() -> None:
    # Ways to write 2^7 as an ordered product of four: 7 twos into 4 boxes.
    assert len(set(grids(128))) == len(list(grids(128))) == 120
    assert all(grid.size == 128 for grid in grids(128))


def test_a_layout_in_words() -> None:
    layout = Layout(Grid(2, 4, 1, 2), True, 1, "cpu", Recompute("full", every=2), 3)
    assert describe(layout) == "data 4 tensor 2 sequence pipeline 2 context 1, zero 1 offload, recompute every 2, micro 3"
    assert describe(layout, 3) == "data 4 tensor 2 sequence pipeline 2 context 1, zero 1 offload"


@pytest.mark.slow
def test_the_large_search() -> None:
    """Over 100,000 layouts of a 70B model on 128 devices; the published one is among those that fit."""
    config = compose(["recipe=llama2_70b"])
    begun = time.process_time()
    findings = Search(config, 128, Site(H100, 8)).run()
    took = time.process_time() - begun
    assert findings.layouts > 100_000
    assert any(found.layout.grid == Grid(pipeline=16, tensor=8) for found in findings.found)
    assert took < 5.0
    for found in findings.found[:: len(findings.found) // 20]:  # what is found fits, stage by stage
        leaf = found.layout.of(config)
        check(leaf, 128, 8)
        ledger = memory.fullest(leaf, found.layout.grid)
        assert ledger.total == found.device <= SHARE * H100.memory
        assert seconds(estimate(leaf, found.layout.grid, Site(H100, 8))) == pytest.approx(found.seconds)

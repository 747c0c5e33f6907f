"""Steps on paper against published ones: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
Megatron-LM", table 1. Their sizes, degrees and batches, A100 80 GB, 8 on a host, fp16, every block computed again."""

from __future__ import annotations

import pytest

from framework.config.schema import Batch, Config, Data, Model, Parallel, Precision, Recompute, Zero
from framework.planner.cost import estimate, seconds
from framework.planner.hardware import Site, named
from framework.topology.grid import Grid

# heads, width, blocks, tensor, pipeline, ranks, batch, achieved TFLOP/s per rank (table 1; micro-batches are not in it: 1 for the large)
ROWS = [
    (32, 4096, 36, 4, 1, 128, 512, 142),  # 7.5B
    (48, 6144, 40, 8, 1, 256, 1024, 135),  # 18.4B
    (64, 8192, 48, 8, 2, 512, 1536, 138),  # 39.1B
    (80, 10240, 60, 8, 4, 1024, 1792, 140),  # 76.1B
    (96, 12288, 80, 8, 8, 1536, 2304, 148),  # 145.6B
]
SEQUENCE, VOCABULARY = 2048, 51200


def on_paper(row: tuple[int, ...]) -> float:
    """Seconds of a step."""
    heads, width, blocks, tensor, pipeline, ranks, samples, _ = row
    model = Model(
        hidden_size=width, num_layers=blocks, num_heads=heads, ffn_hidden_size=4 * width, vocab_size=VOCABULARY,
        max_positions=SEQUENCE, norm="layernorm", position="learned", mlp="gelu", bias=True,
    )  # fmt: skip
    data = ranks // tensor // pipeline
    config = Config(
        model=model, data=Data(seq_length=SEQUENCE), batch=Batch(samples, 4 if pipeline == 1 else 1), precision=Precision("fp16"),
        zero=Zero(1), parallel=Parallel(tensor=tensor, pipeline=pipeline), recompute=Recompute("full"),
    )  # fmt: skip
    return seconds(estimate(config, Grid(pipeline, data, 1, tensor), Site(named("a100_80gb"), 8)))


def published(row: tuple[int, ...]) -> float:
    """Seconds of a step, from the FLOP of their equation 3 and the rate of their table 1."""
    _, width, blocks, _, _, ranks, samples, rate = row
    flop = 96 * samples * SEQUENCE * blocks * width**2 * (1 + SEQUENCE / (6 * width) + VOCABULARY / (16 * blocks * width))
    return flop / (ranks * rate * 1e12)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[1]}x{row[2]}")
def test_whole_steps(row: tuple[int, ...]) -> None:
    assert on_paper(row) == pytest.approx(published(row), rel=0.30)


def test_the_published_rates_are_met_on_the_whole() -> None:
    ratios = [on_paper(row) / published(row) for row in ROWS]
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.15)

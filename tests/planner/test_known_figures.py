"""Figures that the field knows by heart come out: of the papers' formulas, and of the Ledger where DeepSpeed does what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.config import parameters
from framework.config.compose import compose
from framework.config.schema import Model
from framework.planner import memory
from framework.planner.textbook import Kept, block_activations, zero_states
from framework.topology.grid import Grid

GB = 1e9
STATES = ("parameters", "gradients", "masters", "moments")


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_figure_1(stage: int, expected: float) -> None:
    assert sum(zero_states(7.5e9, 64, stage).values()) / GB == pytest.approx(expected, abs=0.05)


def test_seven_billion_parameters_take_112_gb() -> None:
    assert sum(zero_states(7e9, 1, 0).values()) == 112 * GB


def seven_billion(*words: str) -> tuple[dict[str, int], int]:
    """The Ledger's rows of Llama 2 7B (6.74 billion parameters) on `words`, with one rank or 64."""
    shape = ["hidden_size=4096", "num_layers=32", "num_heads=32", "num_kv_heads=32", "ffn_hidden_size=11008", "vocab_size=32000"]
    config = compose(["recipe=llama_8b", *(f"model.{word}" for word in shape), "model.tie_embeddings=false", *words])
    ranks = 64 if "batch.global_size=128" in words else 1
    return memory.predict(config, Grid(data=ranks)).rows(), parameters.count(config.model)


def test_sixteen_bytes_a_parameter_and_the_fp32_sums_beside_them() -> None:
    rows, count = seven_billion("precision=bf16", "zero=stage1", "batch.global_size=2")
    assert count == 6_738_415_616  # Touvron et al. 2023
    assert sum(rows[book] for book in STATES) == pytest.approx(16 * count, rel=1e-6)
    assert rows["accumulation"] == pytest.approx(4 * count, rel=1e-6)


def test_stage_1_on_64_ranks_is_the_papers() -> None:
    rows, count = seven_billion("precision=bf16", "zero=stage1", "batch.global_size=128")
    assert sum(rows[book] for book in STATES) == pytest.approx(sum(zero_states(count, 64, 1).values()), rel=1e-6)


@pytest.mark.parametrize(("stage", "less"), [(2, 2), (3, 2)])
def test_stages_2_and_3_keep_fp32_sums_in_the_place_of_half_gradients(stage: int, less: int) -> None:
    rows, count = seven_billion("precision=bf16", f"zero=stage{stage}", "batch.global_size=128")
    paper = zero_states(count, 64, stage)
    assert "gradients" not in rows
    assert sum(rows[book] for book in STATES if book in rows) == pytest.approx(sum(paper.values()) - less * count / 64, rel=1e-5)
    assert rows["accumulation"] == pytest.approx(4 * count / 64, rel=1e-5)


def test_weights_of_70_billion_parameters_take_140_gb() -> None:
    assert 2 * parameters.count(compose(["recipe=llama2_70b"]).model) / GB == pytest.approx(140, rel=0.02)


# Korthikanti et al. 2022, table 3: heads, hidden size, micro-batch; sequence 2048, tensor 8.
SHAPES = {"22B": (64, 6144, 4), "175B": (96, 12288, 1), "530B": (128, 20480, 1), "1T": (160, 25600, 1)}


@pytest.mark.parametrize("name", list(SHAPES))
def test_activation_formulas_of_korthikanti(name: str) -> None:
    heads, hidden, micro = SHAPES[name]
    s, t, b, h, a = 2048, 8, micro, hidden, heads
    model = replace(Model(), hidden_size=hidden, num_heads=heads)
    equations: dict[tuple[int, bool, Kept], float] = {
        (1, False, "all"): s * b * h * (34 + 5 * a * s / h),
        (t, False, "all"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (t, True, "all"): s * b * h / t * (34 + 5 * a * s / h),
        (t, False, "selective"): s * b * h * (10 + 24 / t),
        (t, True, "selective"): s * b * h * 34 / t,
        (1, False, "full"): s * b * h * 2,
    }
    for (tensor, sequence, keep), expected in equations.items():
        assert block_activations(model, s, b, tensor, sequence, keep) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "share"), [("175B", 0.70), ("530B", 0.65)])
def test_the_share_that_selective_recomputation_saves(name: str, share: float) -> None:
    """Section 5: 70 % and 65 % of the activations."""
    heads, hidden, micro = SHAPES[name]
    model = replace(Model(), hidden_size=hidden, num_heads=heads)
    whole, left = (block_activations(model, 2048, micro, keep=keep) for keep in ("all", "selective"))
    assert 1 - left / whole == pytest.approx(share, abs=0.005)

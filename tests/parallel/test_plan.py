"""The plan: every element of every logical tensor has exactly one writer, whole heads stay together, and the big models fit."""

from __future__ import annotations

from math import prod

import pytest

from framework.checkpoint.shards import Shard, boxes
from framework.config import parameters
from framework.config.compose import compose
from framework.config.schema import Model
from framework.parallel.plan import plan

SMALL = Model(hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_hidden_size=20, vocab_size=31, bias=True, norm="layernorm")


@pytest.mark.parametrize("degree", [1, 2])
def test_every_element_is_written_once(degree: int) -> None:
    parts = [plan(SMALL, degree, rank) for rank in range(degree)]
    for entry in parameters.table(SMALL):
        if entry.tied_to is not None:
            continue
        written = [part[entry.name] for part in parts if part[entry.name].primary]
        count = 0
        for logical in written:
            count += sum(prod(box.size) for box in boxes(Shard("master", logical, 0, prod(logical.size), "F32")))
        assert count == prod(entry.shape), entry.name


def test_parts_of_a_small_model() -> None:
    """By hand: two ranks; 31 rows are two parts of 16, the last with one row of padding; two query heads and one key head each."""
    second = plan(SMALL, 2, 1)
    assert (second["embed_tokens.weight"].offset, second["embed_tokens.weight"].size) == ((16, 0), (16, 16))
    assert (second["layers.0.attention.q_proj.weight"].offset, second["layers.0.attention.q_proj.weight"].size) == ((8, 0), (8, 16))
    assert (second["layers.0.attention.k_proj.bias"].offset, second["layers.0.attention.k_proj.bias"].size) == ((4,), (4,))
    assert (second["layers.0.attention.o_proj.weight"].offset, second["layers.0.attention.o_proj.weight"].size) == ((0, 8), (16, 8))
    assert (second["layers.0.mlp.down_proj.weight"].offset, second["layers.0.mlp.down_proj.weight"].size) == ((0, 10), (16, 10))
    assert second["layers.0.mlp.down_proj.bias"].size == second["layers.0.mlp.down_proj.bias"].shape == (16,)
    assert not second["layers.0.attn_norm.weight"].primary
    assert plan(SMALL, 2, 0)["layers.0.attn_norm.weight"].primary


def test_llama2_70b_over_eight_ranks_keeps_whole_heads() -> None:
    model = compose(["recipe=llama2_70b"]).model
    for rank in range(8):
        part = plan(model, 8, rank)
        assert part["layers.79.attention.k_proj.weight"].size == (128, 8192)  # one of eight key heads, 128 wide
        assert part["layers.79.attention.q_proj.weight"].offset == (1024 * rank, 0)

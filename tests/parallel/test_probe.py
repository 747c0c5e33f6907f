"""What a probe measures against counts by hand, and what is chosen from made-up costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from framework.config.compose import compose
from framework.config.schema import Config
from framework.parallel.probe import Cost, Probe, choose, plain_block

WORDS = ["model.num_layers=3", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=4", "model.ffn_hidden_size=48"]
WORDS += ["data.seq_length=16", "batch.micro_size=2", "data=synthetic", "model.norm=layernorm"]
TOKENS, BLOCKS, HIDDEN, WIDE, FLOAT = 32, 3, 32, 48, 4


def probe(*words: str) -> tuple[Config, Probe]:
    config = compose([*WORDS, *words])
    return config, Probe(config, plain_block(config, torch.device("cpu")))


@pytest.mark.parametrize(
    ("kind", "words", "width"),
    [
        ("mlp", [], 4 * WIDE),  # gate, up, silu(gate), and their product
        ("activation", [], 2 * WIDE),  # silu(gate) and the product
        ("ffn_in", [], 3 * WIDE),  # gate, up, silu(gate)
        ("activation", ["model.mlp=gelu"], WIDE),  # the product
        ("norm", [], 2 * (HIDDEN + 2)),  # of two norms the output, mean and root
    ],
)
def test_bytes_that_a_kind_frees(kind: str, words: list[str], width: int) -> None:
    _, found = probe(*words)
    assert found.kind(kind).nbytes == BLOCKS * TOKENS * width * FLOAT


def test_bytes_halve_with_the_type() -> None:
    assert probe("precision=bf16", "zero=stage1")[1].kind("mlp").nbytes == BLOCKS * TOKENS * 4 * WIDE * 2


def test_a_context_rank_has_its_share_of_the_tokens() -> None:
    assert probe("parallel.context=2")[1].kind("mlp").nbytes == BLOCKS * TOKENS // 2 * 4 * WIDE * FLOAT


def test_all_activations_hold_those_of_every_kind() -> None:
    _, found = probe()
    whole = found.activations()
    assert probe()[1].kind("mlp").nbytes + probe()[1].kind("norm").nbytes < whole
    deeper = replace(found.config, model=replace(found.config.model, num_layers=6))
    more = Probe(deeper, plain_block(deeper, torch.device("cpu"))).activations()
    assert whole < more < 2 * whole  # the head's are there once


def test_seconds_are_of_the_machine() -> None:
    _, found = probe()
    times = found.times()
    assert min(times) > 0
    assert found.kind("mlp").seconds > 0


# ---------------------------------------------------------------- the choice

WHOLE = Cost(1000, 10.0)


def chosen(costs: dict[str, tuple[int, float]], extra: float = 0.1, share: float = 0.15) -> tuple[str, ...]:
    return choose({kind: Cost(*cost) for kind, cost in costs.items()}, WHOLE, extra, share)


def test_most_bytes_per_second_first_until_the_time_is_spent() -> None:
    costs = {"attention": (200, 0.5), "activation": (300, 0.1), "norm": (160, 0.3)}  # 400, 3000, 533 bytes a second
    assert chosen(costs) == ("activation", "attention", "norm")  # 0.9 of 1 second
    assert chosen(costs, extra=0.05) == ("activation", "norm")
    assert chosen(costs, extra=0.01) == ("activation",)
    assert chosen(costs, extra=0.0) == ()


def test_small_kinds_are_no_candidates() -> None:
    assert chosen({"norm": (150, 0.0), "core": (151, 0.0)}) == ("core",)
    assert chosen({"norm": (150, 0.0)}, share=0.1) == ("norm",)


def test_the_wider_kind_takes_the_place_of_what_it_holds() -> None:
    costs = {"activation": (300, 0.1), "mlp": (600, 0.6)}
    assert chosen(costs) == ("mlp",)  # not 0.7 seconds
    assert chosen(costs, extra=0.065) == ("mlp",)
    assert chosen(costs, extra=0.05) == ("activation",)
    assert chosen({"mlp": (600, 0.1), "activation": (300, 0.2)}) == ("mlp",)

"""Initial weights: a function of seed, name and row, whoever draws them and in which pieces."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from framework.config import schema
from framework.model.init import initialise, rows
from framework.model.transformer import Transformer

SHAPE = (700, 33)


def draw(start: int, stop: int, name: str = "layers.0.mlp.up_proj.weight", seed: int = 1) -> torch.Tensor:
    return rows(name, SHAPE, start, stop, 0.02, seed)


@pytest.mark.parametrize("cuts", [(0, 100, 300, 700), (0, 256, 512, 700), (0, 1, 255, 257, 699, 700), (0, 350, 350, 700)])
def test_rows_do_not_depend_on_the_pieces(cuts: tuple[int, ...]) -> None:
    pieces = [draw(start, stop) for start, stop in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), draw(0, 700))


def test_rows_do_not_depend_on_the_height() -> None:
    assert torch.equal(rows("a", (601, 7), 0, 601, 1.0, 1), rows("a", (1000, 7), 0, 601, 1.0, 1))


def test_seed_name_and_block_each_matter() -> None:
    base = draw(0, 256)
    assert not torch.equal(base, draw(0, 256, seed=2))
    assert not torch.equal(base, draw(0, 256, name="layers.1.mlp.up_proj.weight"))
    assert not torch.equal(base, draw(256, 512))


def test_values_are_normal() -> None:
    values = rows("embed_tokens.weight", (4096, 256), 0, 4096, 0.02, 5).double() / 0.02
    n = values.numel()
    assert abs(values.mean().item()) < 5 / math.sqrt(n)
    assert abs(values.var().item() - 1) < 5 * math.sqrt(2 / n)
    assert abs((values**4).mean().item() - 3) < 5 * math.sqrt(96 / n)


def test_another_process_draws_the_same() -> None:
    """Python's own hash() differs from process to process."""
    code = (
        "import hashlib\nfrom framework.model.init import rows\n"
        "print(hashlib.sha256(rows('x', (300, 20), 0, 300, 0.02, 9).numpy().tobytes()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "12345"}, capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == hashlib.sha256(rows("x", (300, 20), 0, 300, 0.02, 9).numpy().tobytes()).hexdigest()


def test_every_kind_of_parameter(gpt2: schema.Model) -> None:
    model = replace(gpt2, hidden_size=96, ffn_hidden_size=384, num_layers=8, vocab_size=500, init_std=0.05)
    net = Transformer(model)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(math.nan)
    initialise(net, model, seed=3)
    for name, parameter in net.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            std = 0.05 / 4 if "o_proj" in name or "down_proj" in name else 0.05  # sqrt(2 * 8) = 4
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * parameter.numel())), name


def test_the_global_random_numbers_are_left_alone(family: schema.Model) -> None:
    net = Transformer(family)
    before = torch.get_rng_state()
    initialise(net, family, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_models_of_one_seed_are_equal_and_of_two_seeds_are_not(family: schema.Model) -> None:
    first, second, third = (Transformer(family) for _ in range(3))
    for net, seed in ((first, 1), (second, 1), (third, 2)):
        initialise(net, family, seed)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert parameter.dim() == 1 or not torch.equal(parameter, third.get_parameter(name)), name


def test_half_weights_are_the_rounded_fp32_ones(llama: schema.Model) -> None:
    whole, half = Transformer(llama), Transformer(llama).bfloat16()
    for net in (whole, half):
        initialise(net, llama, 1)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name).bfloat16()), name


def test_a_model_built_without_storage(llama: schema.Model) -> None:
    with torch.device("meta"):
        net = Transformer(llama)
    net.to_empty(device="cpu")
    net.tie()
    initialise(net, llama, 1)
    plain = Transformer(llama)
    initialise(plain, llama, 1)
    ids = torch.arange(8)[None]
    assert net.lm_head.weight is net.embed_tokens.weight
    assert torch.equal(net(ids), plain(ids))

"""Activations and the peak on paper against a plain model at work: every recompute choice, Llama and GPT-2, three precisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from framework.config.schema import Model, Precision, Recompute
from framework.monitor.memory import SavedActivations
from framework.planner import activations
from framework.planner.activations import ACCELERATOR, CPU
from tests.model.conftest import GPT2, LLAMA
from tests.planner.books import CHOICES, beside, config_of, measure, with_documents_apart

WIDE = Model(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_hidden_size=172, vocab_size=512, max_positions=64)
SHAPES = {
    "llama": WIDE,
    "qwen": replace(WIDE, attention_bias="qkv", qk_norm=True),
    "gpt2": replace(
        WIDE, norm="layernorm", position="learned", mlp="gelu", bias=True, num_kv_heads=None, ffn_hidden_size=256, tie_embeddings=False
    ),
}
PRECISIONS = {"fp32": Precision(), "bf16": Precision("bf16"), "bf16_autocast": Precision("bf16", autocast=True)}


@pytest.mark.parametrize("documents", ["joined", "apart"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("shape", "dropout"), [*((shape, 0.0) for shape in SHAPES), ("llama", 0.1), ("gpt2", 0.1)])
def test_every_recompute_choice_keeps_what_the_paper_says(shape: str, precision: str, dropout: float, documents: str) -> None:
    wrong = {}
    for name, choice in CHOICES.items():
        config = config_of(replace(SHAPES[shape], dropout=dropout), PRECISIONS[precision], choice, 2, 64)
        found = measure(with_documents_apart(config) if documents == "apart" else config)
        error = found.paper.device["activations"] / found.activations - 1
        peak = found.paper.peak / (found.peak + beside(found.paper)) - 1
        if abs(error) > 0.05 or abs(peak) > 0.10:
            wrong[name] = (round(error, 3), round(peak, 3))
    assert not wrong, wrong


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_bytes_grow_with_the_micro_batch_alone(model: Model) -> None:
    def bytes_of(micro: int) -> int:
        return measure(config_of(model, Precision(), Recompute(), micro, 16)).paper.device["activations"]

    rotation = 16 * model.head_width * 4 if model.position == "rope" else 0  # cosines and sines of half a head each
    assert bytes_of(6) - rotation == 6 * (bytes_of(1) - rotation)


def test_one_block_of_gpt2_by_hand() -> None:
    """fp32, without dropout: two inputs of norms with mean and root, three projections' input, q, k, v, what attention gives and its
    log-sums, and the four-fold feed-forward layer before and after its activation."""
    tokens, width, heads = 64, 64, 4
    by_hand = 4 * tokens * (2 * (width + 2) + width + 3 * width + width + heads + width + 2 * 4 * width)
    assert sum(activations.block(config_of(SHAPES["gpt2"], Precision(), Recompute(), 1, 64), CPU).values()) == by_hand


def test_a_fused_norm_keeps_no_copy() -> None:
    config = config_of(SHAPES["llama"], Precision("bf16"), Recompute(), 1, 64)
    plain, fused = (sum(activations.block(config, kernels).values()) for kernels in (CPU, ACCELERATOR))
    assert plain - fused == 64 * 2 * (64 * 4 + 64 * 2)  # of each norm the normalised copy, and half of the fp32 input


def test_a_watched_model_is_left_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    saved = SavedActivations(model)
    saved.begin()
    model(torch.ones(2, 4)).sum().backward()
    saved.end()
    before = dict(saved.kept)
    model(torch.ones(200, 4)).sum().backward()
    assert saved.kept == before == {"stream": (2 * 4 + 2 * 4) * 4}  # the input, and what the first layer gives
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

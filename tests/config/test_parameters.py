"""The table of parameters against the live model and the published sizes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from framework.config import parameters, schema
from framework.model.transformer import Transformer

PRESETS = Path(__file__).parents[2] / "conf" / "model"
PUBLISHED = {"gpt2_124m": 124_439_808, "llama_1b": 1_235_814_400, "llama_8b": 8_030_261_248, "llama2_70b": 68_976_648_192}


def preset(name: str) -> schema.Model:
    settings = OmegaConf.to_container(OmegaConf.load(PRESETS / f"{name}.yaml"))
    assert isinstance(settings, dict)
    return schema.Model(**{str(key): value for key, value in settings.items()})


def without_storage(model: schema.Model) -> Transformer:
    with torch.device("meta"):
        return Transformer(model)


def random_model(seed: int) -> schema.Model:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 4])
    bias = draw.choice([True, False])
    return schema.Model(
        hidden_size=heads * 2 * draw.randint(1, 8),
        num_layers=draw.randint(1, 4),
        num_heads=heads,
        num_kv_heads=draw.choice([None, kv_heads]),
        head_dim=draw.choice([None, 6]),
        ffn_hidden_size=draw.randint(3, 50),
        vocab_size=draw.randint(2, 90),
        max_positions=draw.randint(1, 40),
        norm=draw.choice(["rmsnorm", "layernorm"]),
        position=draw.choice(["rope", "learned"]),
        mlp=draw.choice(["swiglu", "gelu"]),
        bias=bias,
        attention_bias=draw.choice(["none", "qkv", "all"]) if not bias else "none",
        qk_norm=draw.choice([True, False]),
        tie_embeddings=draw.choice([True, False]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_table_is_the_live_model(seed: int) -> None:
    model = random_model(seed)
    net, table = without_storage(model), parameters.table(model)
    everything = {name: tuple(parameter.shape) for name, parameter in net.named_parameters(remove_duplicate=False)}
    own = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    assert len({entry.name for entry in table}) == len(table)
    assert {entry.name: entry.shape for entry in table} == everything
    assert {entry.name: entry.shape for entry in table if entry.tied_to is None} == own
    for entry in table:
        assert entry.tied_to is None or net.get_parameter(entry.name) is net.get_parameter(entry.tied_to)
        assert entry.decayed == (net.get_parameter(entry.name).dim() == 2)
        assert entry.block == (int(entry.name.split(".")[1]) if entry.name.startswith("layers.") else None)
    assert parameters.count(model) == sum(parameter.numel() for parameter in net.parameters())


def test_split_axes() -> None:
    """Column parallel in, row parallel out; a row-parallel bias, norms and positions are whole on every rank."""
    model = schema.Model(norm="layernorm", position="learned", bias=True)
    split = {entry.name.removeprefix("layers.1."): entry.split for entry in parameters.table(model) if entry.block != 0}
    for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert (split.pop(f"{name}.weight"), split.pop(f"{name}.bias")) == (0, 0)
    for name in ("attention.o_proj", "mlp.down_proj"):
        assert (split.pop(f"{name}.weight"), split.pop(f"{name}.bias")) == (1, None)
    assert (split.pop("embed_tokens.weight"), split.pop("lm_head.weight")) == (0, 0)
    assert set(split.values()) == {None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    model = preset(name)
    assert parameters.count(model) == PUBLISHED[name]
    assert sum(parameter.numel() for parameter in without_storage(model).parameters()) == PUBLISHED[name]


def test_size_of_the_demo() -> None:
    """By hand: embedding, two blocks (q and o, k and v of half width, three feed-forward matrices, two norms), final norm."""
    block = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128
    assert parameters.count(preset("tiny")) == 256 * 128 + 2 * block + 128


def test_table_needs_no_torch() -> None:
    code = "import sys, framework.config.parameters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

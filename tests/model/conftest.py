"""Small models whose every parameter is random, so that a norm or bias that is left out shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from framework.config import schema
from framework.model.transformer import Transformer

LLAMA = schema.Model(
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=40,
    vocab_size=31,
    max_positions=16,
    rope_theta=500.0,
)
GPT2 = schema.Model(
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    ffn_hidden_size=40,
    vocab_size=31,
    max_positions=16,
    norm="layernorm",
    position="learned",
    mlp="gelu",
    bias=True,
)


@pytest.fixture
def llama() -> schema.Model:
    """Grouped heads, tied, heads wider than hidden_size / num_heads."""
    return LLAMA


@pytest.fixture
def gpt2() -> schema.Model:
    return GPT2


@pytest.fixture(params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def family(request: pytest.FixtureRequest) -> schema.Model:
    """One test, both families."""
    return request.param


@pytest.fixture
def scrambled() -> Callable[[schema.Model], Transformer]:
    def make(model: schema.Model) -> Transformer:
        generator = torch.Generator().manual_seed(7)
        net = Transformer(model).eval()
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                centre = 1.0 if name.endswith("norm.weight") else 0.0
                parameter.normal_(centre, 0.3, generator=generator)
        return net

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """[2, 9] token ids below 31."""
    return torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))

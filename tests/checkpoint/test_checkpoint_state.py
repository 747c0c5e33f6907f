"""Random states as plain JSON: every generator goes on as if nothing had happened."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from framework.checkpoint.state import DTYPES, dtype_name, restore_rng, rng_state


def draw() -> list[float]:
    """A normal number first: Python and NumPy keep the second of each pair for the next call."""
    host = [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    return [*host, torch.randn(3).sum().item(), *torch.randperm(9).tolist()]


@pytest.mark.parametrize("warm", [0, 1, 2, 700])
def test_round_trip_through_json_is_exact(warm: int) -> None:
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    for _ in range(warm):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    state = json.loads(json.dumps(rng_state(None, {})))
    expected = [draw() for _ in range(3)]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert restore_rng(state, None, {}) == []
    assert [draw() for _ in range(3)] == expected
    restore_rng(state, None, {})
    assert rng_state(None, {}) == state


class Device:
    """An accelerator whose generator is a CPU generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def get_rng_state(self) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        self.generator.set_state(new_state)


def test_the_accelerators_generator_is_kept() -> None:
    device = Device()
    state = json.loads(json.dumps(rng_state(device, {})))
    expected = torch.rand(4, generator=device.generator)
    assert restore_rng(state, device, {}) == []
    assert torch.equal(torch.rand(4, generator=device.generator), expected)


def test_a_generator_that_cannot_be_carried_over_is_named() -> None:
    assert restore_rng(rng_state(None, {}), Device(), {}) == ["accelerator"]
    assert restore_rng(rng_state(Device(), {}), None, {}) == ["accelerator"]


def test_dtype_names_are_those_of_safetensors(tmp_path: object) -> None:
    from safetensors.torch import save

    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        content = save({"t": torch.zeros(1, dtype=dtype)})
        assert json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["t"]["dtype"] == name

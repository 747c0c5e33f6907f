"""What is made of the gradients that were looked at: the earliest place over ranks, the spread over layers, and no change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from framework.checkpoint.shards import Logical
from framework.monitor.gradients import First, GradientWatch, Seen, layer_of, magnitudes, module_of, spread, together


def test_the_earliest_over_ranks() -> None:
    """An earlier micro-batch comes first, then the later stage of a pipeline, then the position."""
    late, early = First((1, 0, 0), "a"), First((0, 1, 7), "b")
    seen = together([Seen(late, {"layers.0": 2.0}), Seen(None, {"layers.0": 3.0, "lm_head": 1.0}), Seen(early, {})])
    assert seen == Seen(early, {"layers.0": 3.0, "lm_head": 1.0})
    before, behind = First((0, 1, 0), "first stage"), First((0, 0, 9), "last stage")
    assert together([Seen(before, {}), Seen(behind, {})]).first == behind


def test_magnitudes_and_spread() -> None:
    logs = magnitudes({"layers.10": 8.0, "layers.2": 0.5, "embed_tokens": 0.0}, loss_scale=4.0)
    assert logs == {"embed_tokens": None, "layers.2": -3.0, "layers.10": 1.0}
    assert list(logs) == ["embed_tokens", "layers.2", "layers.10"]
    assert spread(logs.values()) == 4.0
    assert spread([None]) is None


def test_names() -> None:
    assert [layer_of(name) for name in ("layers.3.mlp.up_proj.weight", "final_norm.weight")] == ["layers.3", "final_norm"]
    assert module_of("layers.3.mlp.up_proj.weight") == "layers.3.mlp.up_proj"


def test_a_watch_sees_gradients_and_leaves_them_alone() -> None:
    """Two micro-batches; in the second one the first layer's gradient overflows, and the last one's is known in closed form."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for index, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 2.0)
        parameter.logical = Logical.whole(f"layers.{index}.weight", parameter.shape)  # type: ignore[attr-defined]
    watch = GradientWatch(model, stage=0)
    watch.begin()
    model(torch.tensor([[1.0, 3.0]])).sum().backward()
    middle = model[0](torch.tensor([[1.0, 3.0]]))
    middle.register_hook(lambda gradient: gradient * math.inf)
    model[1](middle).sum().backward()
    watch.end()
    seen = watch.seen()
    assert seen.first == First((1, 0, 3), "layers.0.weight")
    assert seen.largest == {"layers.1": 8.0, "layers.0": 6.0}  # 2 x (1 + 3), and 2 x 3
    weight = model[1].weight.grad
    assert weight is not None
    assert weight.tolist() == [[16.0, 16.0]]
    model(torch.tensor([[1.0, 3.0]])).sum().backward()
    assert watch.seen() == seen, "it still looks after its end"


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_gradient_without_elements_is_passed_over(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.logical = Logical.whole("layers.0.weight", parameter.shape)  # type: ignore[attr-defined]
    holder = nn.Module()
    holder.register_parameter("weight", parameter)
    watch = GradientWatch(holder, 0)
    watch.begin()
    parameter.sum().backward()
    assert watch.seen() == Seen(None, {})

"""A window over a few known operators on the CPU: what was called, with which shapes and types, and the files."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from framework.monitor.operators import Span
from framework.monitor.profiler import Window

CPU = torch.device("cpu")


def looked_at(window: Window) -> list[Span]:
    """A product, attention and a fused update inside the span, and a product of another shape outside it."""
    weight = nn.Parameter(torch.randn(4, 5))
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    window.begin()
    began = time.time_ns()
    loss = (torch.randn(3, 4) @ weight).sum() + F.scaled_dot_product_attention(query, query, query, is_causal=True).sum()
    loss.backward()
    torch.optim.AdamW([weight], fused=True).step()
    ended = time.time_ns()
    time.sleep(0.001)
    torch.randn(6, 6) @ torch.randn(6, 7)
    window.end()
    return [(began, ended)]


@pytest.mark.parametrize("deep", [False, True])
def test_what_was_called(deep: bool) -> None:
    window = Window(CPU, deep)
    recorded = window.recorded(looked_at(window))
    products = [call for call in recorded.calls if call.name == "aten::mm"]
    assert [call.shapes for call in products] == [((3, 4), (4, 5)), ((4, 3), (3, 5))]
    assert [call.flop for call in products] == [120, 120]
    assert {call.torch_flop for call in products} == ({120} if deep else {0})
    assert {call.types for call in products} == {("float", "float")}
    scores = 2 * 2 * 8 * 8 * 4
    assert sum(call.flop for call in recorded.calls if "attention" in call.name) == (2 + 5) * scores // 2
    (update,) = [call for call in recorded.calls if call.name == "aten::_fused_adamw_"]
    assert update.bytes == 4 * (4 * 20 + 1 + 3 * 20)
    assert not [call.name for call in recorded.calls if call.name.startswith("autograd") or call.name.endswith("Backward0")]
    assert all(0 <= call.own <= call.ended - call.began for call in recorded.calls)
    assert bool(recorded.memory) == deep


def test_files_of_a_window(tmp_path: Path) -> None:
    window = Window(CPU, deep=True)
    window.begin()
    kept = [torch.zeros(1000) for _ in range(3)]
    kept.pop()
    window.end()
    assert window.write(tmp_path / "profile", 3, base=10_000) == ["trace_3.json.gz", "memory_3.json"]
    trace = json.loads(gzip.decompress((tmp_path / "profile/trace_3.json.gz").read_bytes()))
    assert sum(event["name"] == "aten::zeros" for event in trace["traceEvents"]) == 3
    page = json.loads((tmp_path / "profile/memory_3.json").read_text())
    assert page["base_bytes"] == 10_000
    assert [nbytes for _, nbytes in page["points"]] == [14_000, 18_000, 22_000, 18_000]
    assert page["points"][0][0] == 0

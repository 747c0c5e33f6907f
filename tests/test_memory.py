"""The counter of live bytes against sums by hand."""

from __future__ import annotations

import torch

from tests.memory import LiveBytes


def test_live_and_peak() -> None:
    with LiveBytes() as live:
        a = torch.ones(1000)
        b = a.view(10, 100)  # the same memory
        c = a + 1
        assert live.now == 8000
        del c
        assert live.now == 4000
        a.add_(1)
        assert (live.now, live.peak) == (4000, 8000)
        del a
        assert live.now == 4000  # b holds it
        del b
    assert (live.now, live.peak) == (0, 8000)


def test_what_autograd_keeps_and_frees() -> None:
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        out = (weight * 2).exp()  # keeps its result
        loss = out.exp().sum()  # and so does this one
        del out
        assert live.now == 400 + 400 + 4
        loss.backward()
        del loss
        assert live.now == 400  # the gradient
    assert live.peak >= 1204


def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        before.add_(1)
        assert before.view(10, 100).shape == (10, 100)
    assert (live.now, live.peak) == (0, 0)

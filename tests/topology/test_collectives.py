"""Collectives inside the backward pass: values against plain arithmetic on all ranks' inputs, gradients against their transpose."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.topology import collectives
from tests.ranks import run_ranks

BATCH, SEQ, WIDTH = 3, 4, 5


def inputs(rank: int, seq: int) -> Tensor:
    return torch.randn(BATCH, seq, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def work(rank: int, ranks: int) -> dict[str, Any]:
    group: Any = dist.group.WORLD
    found: dict[str, Any] = {
        "sum": collectives.begin_sum(inputs(rank, SEQ), group).wait(),
        "gather": collectives.begin_gather(inputs(rank, SEQ // ranks), group).wait(),
        "scatter": collectives.begin_scatter_sum(inputs(rank, SEQ), group).wait(),
        "slice": collectives.own_slice(inputs(0, SEQ), group),
    }
    for name, operation in (("sum", collectives.sum_over), ("scatter", collectives.scatter_sum_over)):
        value = inputs(rank, SEQ).requires_grad_()
        out = operation(value, group)
        assert torch.equal(out, found[name])
        out.backward(inputs(10 + rank, out.shape[1]))
        found[f"{name} gradient"] = value.grad
        assert torch.equal(value, inputs(rank, SEQ))  # the input is left as it was
    return found


def test_values_and_gradients() -> None:
    ranks = 2
    results = run_ranks(work, ranks, init=True)
    summed = sum(inputs(rank, SEQ) for rank in range(ranks))
    assert isinstance(summed, Tensor)
    for rank, found in enumerate(results):
        mine = slice(rank * SEQ // ranks, (rank + 1) * SEQ // ranks)
        torch.testing.assert_close(found["sum"], summed)
        torch.testing.assert_close(found["scatter"], summed[:, mine])
        assert torch.equal(found["gather"], torch.cat([inputs(other, SEQ // ranks) for other in range(ranks)], dim=1))
        assert torch.equal(found["slice"], inputs(0, SEQ)[:, mine])
        # Every rank goes on alike with a sum, so its own gradient is the gradient; of slices all are needed.
        assert torch.equal(found["sum gradient"], inputs(10 + rank, SEQ))
        assert torch.equal(found["scatter gradient"], torch.cat([inputs(10 + other, SEQ // ranks) for other in range(ranks)], dim=1))


def heads(seed: int, seq: int, count: int) -> Tensor:
    return torch.randn(BATCH, seq, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exchanged(rank: int, ranks: int) -> dict[str, Tensor]:
    group: Any = dist.group.WORLD
    value = heads(rank, SEQ // ranks, 2 * ranks).requires_grad_()
    out = collectives.heads_for_sequence(value, group)
    out.backward(heads(10 + rank, SEQ, 2))
    assert value.grad is not None
    back = collectives.sequence_for_heads(out, group)
    assert torch.equal(back, value)
    return {"out": out.detach(), "gradient": value.grad, "whole": collectives.whole_sequence(value, group)}


def test_heads_for_sequence_and_back() -> None:
    """Rank r gets heads 2r and 2r + 1 of the whole sequence; the gradient goes the other way."""
    ranks = 2
    results = run_ranks(exchanged, ranks, init=True)
    whole = torch.cat([heads(rank, SEQ // ranks, 2 * ranks) for rank in range(ranks)], dim=1)
    grads = torch.cat([heads(10 + rank, SEQ, 2) for rank in range(ranks)], dim=2)
    for rank, found in enumerate(results):
        assert torch.equal(found["out"], whole[:, :, 2 * rank : 2 * rank + 2])
        assert torch.equal(found["gradient"], grads[:, rank * SEQ // ranks : (rank + 1) * SEQ // ranks])
        assert torch.equal(found["whole"], whole)

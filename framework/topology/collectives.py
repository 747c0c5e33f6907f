"""Collectives inside the forward and backward pass, each with its transpose as gradient (Shoeybi et al. 2019; Korthikanti et al. 2022).

Written for activations [batch, seq, ...] and heads [batch, seq, heads, width]; sums run in the type that comes in, slices are of the
sequence (axis 1) and in rank order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

SEQUENCE, HEADS = 1, 2


class Pending:
    """A collective that was begun; `wait` gives its result."""

    def __init__(self, result: Tensor, work: Any, axis_first: bool = False) -> None:
        """`axis_first`: the parts lie one after the other, [ranks, batch, part, ...], and have to be joined along the sequence."""
        self._result, self._work, self._axis_first = result, work, axis_first

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result.movedim(0, SEQUENCE).flatten(SEQUENCE, SEQUENCE + 1) if self._axis_first else self._result


def begin_sum(value: Tensor, group: dist.ProcessGroup) -> Pending:
    """The sum over the group, of the shape of `value`, in its memory."""
    value = value.contiguous()
    return Pending(value, dist.all_reduce(value, group=group, async_op=True))


def begin_gather(slice_: Tensor, group: dist.ProcessGroup) -> Pending:
    """[batch, seq / ranks, ...] -> [batch, seq, ...]."""
    ranks = dist.get_world_size(group)
    parts = slice_.new_empty(ranks * slice_.shape[0], *slice_.shape[1:])
    work = dist.all_gather_into_tensor(parts, slice_.contiguous(), group=group, async_op=True)
    return Pending(parts.unflatten(0, (ranks, -1)), work, axis_first=True)


def begin_scatter_sum(value: Tensor, group: dist.ProcessGroup) -> Pending:
    """[batch, seq, ...] -> this rank's slice [batch, seq / ranks, ...] of the sum over the group."""
    ranks = dist.get_world_size(group)
    parts = value.unflatten(SEQUENCE, (ranks, -1)).movedim(SEQUENCE, 0).contiguous()
    mine = torch.empty_like(parts[0])
    return Pending(mine, dist.reduce_scatter_tensor(mine, parts.flatten(0, 1), group=group, async_op=True))


def own_slice(value: Tensor, group: dist.ProcessGroup, axis: int = SEQUENCE) -> Tensor:
    """This rank's part of `axis`, a view."""
    return value.chunk(dist.get_world_size(group), dim=axis)[dist.get_rank(group)]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        return begin_sum(value.clone(), group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return begin_scatter_sum(value, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return begin_gather(grads[0], ctx.group).wait(), None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _exchange(value, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.group, ctx.join, ctx.cut), None, None, None


def _exchange(value: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Each rank gives each rank its part of the axis `cut`, and joins what it is given along the axis `join`."""
    parts = value.unflatten(cut, (dist.get_world_size(group), -1)).movedim(cut, 0).contiguous()
    given = torch.empty_like(parts)
    dist.all_to_all_single(given, parts, group=group)
    return given.movedim(0, join).flatten(join, join + 1)


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group; every rank goes on alike, so the gradient is each rank's own."""
    return _Sum.apply(value, group)  # type: ignore[no-any-return]


def scatter_sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of the sum over the group; the gradient is gathered from all slices."""
    return _ScatterSum.apply(value, group)  # type: ignore[no-any-return]


def heads_for_sequence(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of a slice, [batch, seq / ranks, heads, width] -> some heads of the sequence, [batch, seq, heads / ranks, width]."""
    return _Exchange.apply(value, group, HEADS, SEQUENCE)  # type: ignore[no-any-return]


def sequence_for_heads(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `heads_for_sequence`."""
    return _Exchange.apply(value, group, SEQUENCE, HEADS)  # type: ignore[no-any-return]


def whole_sequence(slice_: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq / ranks, ...] -> [batch, seq, ...] on every rank. For evaluation: it has no gradient."""
    return begin_gather(slice_.detach(), group).wait()

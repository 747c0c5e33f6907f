"""Context parallel: each rank of a group has a slice of every sequence (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3).

Everything but attention works on single tokens, so a slice is all it needs. For attention the ranks exchange: slices of all
heads become whole sequences of some heads, and back. The engine takes context ranks for data ranks: each has the whole of
what a tensor rank holds, and a share of the batch's tokens, by which the loss is weighted.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.model.attention import Attention
from framework.model.places import Places
from framework.model.transformer import Positions, Transformer
from framework.topology import collectives


class HeadExchange(nn.Module):
    """In the place of attention's core: the core runs on whole sequences of this rank's share of the heads."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.group = core, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, places: Places) -> Tensor:
        """[batch, seq / ranks, heads, head_dim], key and value with as many heads or fewer -> the shape of query.

        The rotation in `places` is of the slice, the mask of the whole sequence.
        """
        ranks = dist.get_world_size(self.group)
        copies = ranks // math.gcd(key.shape[2], ranks)  # of each key and value head, where there are too few to share
        key, value = (few.repeat_interleave(copies, dim=2) if copies > 1 else few for few in (key, value))
        shares = [heads.unflatten(2, (ranks, -1)) for heads in (query, key, value)]
        widths = [share.shape[3] for share in shares]
        whole = collectives.heads_for_sequence(torch.cat(shares, dim=3).flatten(2, 3), self.group)  # one exchange for all three
        return collectives.sequence_for_heads(self.core(*whole.split(widths, dim=2), places), self.group)


class SlicePositions(Positions):
    """Positions of this rank's slice."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, length: int, device: torch.device, starts: Tensor | None = None) -> Tensor:
        """[length] or [batch, length], which is the length of the slice; `starts` are of the whole sequence."""
        whole = super().forward(length * dist.get_world_size(self.group), device, starts)
        return collectives.own_slice(whole, self.group, axis=-1)


def divide(model: Transformer, group: dist.ProcessGroup) -> None:
    """Let the model compute on this rank's slice of the sequence."""
    model.positions = SlicePositions(group)
    for module in [*model.modules()]:
        if isinstance(module, Attention):
            module.core = HeadExchange(module.core, group)

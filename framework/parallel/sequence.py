"""Sequence parallel: between the split layers each tensor rank has a slice of the sequence (Korthikanti et al. 2022, section 4.2.2).

The split layers gather and slice the residual stream themselves (tensor.Split.leave). What is left: learned positions are
looked up for the slice, and what every rank has whole but uses on its slice (norms, biases after the sum, positions) gets
only a part of its gradient on each rank, which tensor.complete_gradients adds up.
"""

from __future__ import annotations

from torch import Tensor, nn

from framework.model.transformer import Transformer
from framework.parallel.tensor import Split
from framework.topology import collectives


class SlicePositions(nn.Embedding):
    """Learned positions of this rank's slice."""

    def __init__(self, rows: int, width: int, split: Split) -> None:
        super().__init__(rows, width)
        self.split = split

    def forward(self, input: Tensor) -> Tensor:
        """Positions [seq] or [batch, seq] of the whole sequence -> [..., seq / ranks, width]."""
        return super().forward(collectives.own_slice(input, self.split.group, axis=-1))


def slice_(model: Transformer, split: Split) -> None:
    """Put slicing layers in the places of the plain ones."""
    if model.embed_positions is not None:
        model.embed_positions = SlicePositions(model.settings.max_positions, model.settings.hidden_size, split)

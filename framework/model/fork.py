"""Several projections of one input."""

from __future__ import annotations

from torch import Tensor, nn


class Fork(nn.Module):
    """Applies linear layers that another module owns to the same input.

    A module of its own, so that a parallel form can stand in its place and talk to the other ranks once for all of them.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.linears = linears  # in a tuple, where torch does not register them a second time

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[..., width] -> a tensor [..., width of its output] for each layer."""
        return tuple(linear(hidden) for linear in self.linears)

"""Which part of each logical tensor a tensor rank holds, as data: pure arithmetic on config/parameters.py. No torch.

Rows of a column-parallel matrix, columns of a row-parallel one, whole heads of the attention's; everything else is
replicated, and written to a checkpoint by the first tensor rank alone (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from framework.checkpoint.shards import Logical
from framework.config import parameters, schema


def plan(model: schema.Model, degree: int, rank: int) -> dict[str, Logical]:
    """Logical name -> the part of tensor rank `rank` of `degree`; a tied tensor has the name of the one it shares.

    The vocabulary is divided into equal parts, so the last parts may reach beyond it: those rows are padding.
    """
    assert 0 <= rank < degree, f"tensor rank {rank} of {degree}"
    return {entry.name: _part(entry, degree, rank) for entry in parameters.table(model) if entry.tied_to is None}


def _part(entry: parameters.Parameter, degree: int, rank: int) -> Logical:
    if entry.split is None:
        whole = Logical.whole(entry.name, entry.shape)
        return Logical(entry.name, whole.shape, whole.offset, whole.size, primary=rank == 0)
    size = entry.local_shape(degree)
    width = size[entry.split]
    assert width * degree == entry.shape[entry.split] or entry.block is None, f"{entry.name} does not divide by {degree}"
    offset = tuple(rank * width if axis == entry.split else 0 for axis in range(len(size)))
    return Logical(entry.name, entry.shape, offset, size)

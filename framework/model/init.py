"""Initial weights that do not depend on how the model is laid out over ranks.

The values of a matrix are a pure function of (seed, its logical name, block of rows): a rank that keeps some rows draws
only the blocks that hold them. torch's global random numbers are not touched.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from framework.config import parameters, schema

ROWS_PER_BLOCK = 256
"""Part of the definition of the values: another number gives other weights."""


def initialise(module: nn.Module, model: schema.Model, seed: int) -> None:
    """Fill every parameter of the plain model in place, on its device and in its type.

    Matrices are normal(0, init_std); those that write to the residual stream (o_proj, down_proj) get
    init_std / sqrt(2 * num_layers) (Radford et al. 2019, section 2.3); norm weights are 1, biases 0.
    """
    live = dict(module.named_parameters())
    with torch.no_grad():
        for entry in parameters.table(model):
            if entry.tied_to is not None:
                continue
            parameter = live[entry.name]
            assert tuple(parameter.shape) == entry.shape, f"{entry.name}: {tuple(parameter.shape)} is not {entry.shape}"
            if len(entry.shape) == 1:
                parameter.fill_(1.0 if entry.name.endswith("norm.weight") else 0.0)
                continue
            std, height = standard_deviation(entry.name, model), entry.shape[0]
            for start in range(0, height, ROWS_PER_BLOCK):  # not all rows at once: a second embedding of fp32 is slow and large
                stop = min(start + ROWS_PER_BLOCK, height)
                parameter[start:stop] = rows(entry.name, entry.shape, start, stop, std, seed)


def standard_deviation(name: str, model: schema.Model) -> float:
    """Of the initial values of the matrix called `name`."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return model.init_std / math.sqrt(2 * model.num_layers)
    return model.init_std


def rows(name: str, shape: tuple[int, ...], start_row: int, stop_row: int, std: float, seed: int) -> Tensor:
    """Rows start_row to stop_row (not included) of the initial matrix `name` of `shape` [rows, columns].

    Returns fp32 on the CPU, [stop_row - start_row, columns], normal(0, std).
    """
    assert 0 <= start_row <= stop_row <= shape[0], f"{name}: rows {start_row} to {stop_row} of {shape}"
    wanted = torch.empty(stop_row - start_row, shape[1])
    for block in range(start_row // ROWS_PER_BLOCK, math.ceil(stop_row / ROWS_PER_BLOCK)):
        # A block is always drawn whole: the kernel's last few values depend on how many are drawn.
        drawn = torch.empty(ROWS_PER_BLOCK, shape[1]).normal_(0.0, std, generator=_generator(seed, name, block))
        first = block * ROWS_PER_BLOCK
        start, stop = max(start_row, first), min(stop_row, first + ROWS_PER_BLOCK)
        wanted[start - start_row : stop - start_row] = drawn[start - first : stop - first]
    return wanted


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    # 4 bytes, because torch's CPU generator drops the rest of a longer seed.
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

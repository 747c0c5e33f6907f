"""A few logical tensors, and the way to save them under any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from framework.checkpoint.buffers import live
from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import Job, commit, write_part
from tests.checkpoint.layouts import state_of

Save = Callable[..., Path]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (7, 3), "layers.0.weight": (4, 6), "norm.weight": (5,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def save(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Save:
    """save(step, tensor_ranks=1, data_ranks=1, root=...): a synchronous save of all ranks, one after the other."""

    def run(step: int, tensor_ranks: int = 1, data_ranks: int = 1, root: str = str(tmp_path)) -> Path:
        ranks, jobs = tensor_ranks * data_ranks, []
        for rank in range(ranks):
            state = state_of(tensors, tensor_ranks, data_ranks, rank)
            files = arrange([shard for shard, _ in state.shards], rank)
            jobs.append(Job(root, step, f"try-{step}", rank, ranks, files, {"step": step}, state.local, timeout_s=1.0))
            write_part(jobs[-1], live(state))
        commit(jobs[0])
        return Path(root) / f"step_{step:08d}"

    return run

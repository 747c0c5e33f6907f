"""What every in-process test finds: one torch thread, and a place for runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    # Two cores are shared with rank processes, and one thread makes sums come in one order.
    torch.set_num_threads(1)


@pytest.fixture
def run_root(tmp_path: Path) -> Path:
    """An empty folder to hand to `output_root`."""
    root = tmp_path / "runs"
    root.mkdir()
    return root

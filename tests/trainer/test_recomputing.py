"""recompute=auto in a run: one choice of all ranks, kept in run.json, that holds at resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests import runs

EVERYTHING = ["attention", "mlp", "norm"]


def differ() -> None:
    """Rank 1 would choose otherwise."""
    import torch.distributed as dist

    from framework.trainer import recomputing

    recomputing.choose = lambda *given: ("core", "norm") if dist.get_rank() == 0 else ("mlp",)  # type: ignore[assignment]


def test_the_choice_is_kept_and_holds(tmp_path: Path) -> None:
    words = [*runs.SMALL, "recompute=auto", "recompute.min_share=0", "checkpoint=sync"]
    runs.train([*words, "recompute.max_extra_time=1000", "steps=2"], tmp_path)
    run = tmp_path / "runs/run"
    assert runs.facts(run)["resolved"]["recompute.modules"] == EVERYTHING
    runs.train([*words, "recompute.max_extra_time=0", "steps=4"], tmp_path)
    assert runs.facts(run)["resolved"]["recompute.modules"] == EVERYTHING
    assert runs.facts(run)["status"] == "done"
    runs.train([*words, "recompute.max_extra_time=0", "steps=2", "resume=never"], tmp_path)
    assert runs.facts(run)["resolved"]["recompute.modules"] == []


@pytest.mark.slow
def test_all_ranks_take_the_first_ones_choice(tmp_path: Path) -> None:
    runs.train([*runs.SMALL, "recompute=auto", "parallel.tensor=2", "steps=2"], tmp_path, ranks=2, prepare=partial(differ))
    assert runs.facts(tmp_path / "runs/run")["resolved"]["recompute.modules"] == ["core", "norm"]
    losses = runs.losses(tmp_path / "runs/run")
    runs.train([*runs.SMALL, "parallel.tensor=2", "steps=2", "name=none"], tmp_path, ranks=2)
    assert runs.losses(tmp_path / "runs/none") == losses

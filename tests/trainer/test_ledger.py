"""The Ledger of whole trainings: the second step of each start is looked at; predicted and measured stand in run.json and on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import runs

SLICED = ["parallel=tensor2_sequence"]
EXACT = ("parameters", "gradients", "accumulation", "masters", "moments")


def ledger(folder: Path) -> dict[str, Any]:
    return runs.facts(folder / "runs/run")["memory"]


@pytest.mark.parametrize(
    "words",
    [
        ["zero=stage2"],
        ["zero=stage3", "precision=bf16"],
        pytest.param(["parallel=pipeline2", "zero=stage1", "batch.global_size=8"], marks=pytest.mark.slow),
        pytest.param(["parallel=context2", "zero=stage1", "recompute=every_2", "model.num_layers=3"], marks=pytest.mark.slow),
        pytest.param([*SLICED, "precision=bf16_autocast", "recompute=auto", "batch.micro_size=4"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_run_predicts_and_measures_its_books(words: list[str], tmp_path: Path) -> None:
    text = runs.train([*runs.SMALL, "checkpoint=none", "steps=3", "monitor.console=plain", *words], tmp_path, ranks=2)
    found = ledger(tmp_path)
    assert found["step"] == 2
    for book, row in found["books"].items():
        if book in EXACT:
            assert row["measured"] == row["predicted"] > 0, book
    kept = found["books"]["activations"]
    assert kept["predicted"] == pytest.approx(kept["measured"], rel=0.05)
    assert found["worst_error"] <= 0.05
    assert {"attention", "norm", "stream"} & set(found["kept_by"])
    assert "memory of rank" in text
    assert "exact" in text


def test_plain_engine_and_one_step(tmp_path: Path) -> None:
    """A run of one step has no second one; the next start has."""
    words = [*runs.PLAIN, "checkpoint=sync"]
    runs.train([*words, "steps=1"], tmp_path)
    assert "memory" not in runs.facts(tmp_path / "runs/run")
    runs.train([*words, "steps=4"], tmp_path)
    assert ledger(tmp_path)["step"] == 3
    assert ledger(tmp_path)["books"]["moments"]["measured"] == 2 * ledger(tmp_path)["books"]["parameters"]["measured"]


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """The same losses as in a run that is never looked at, bit for bit."""
    runs.train([*runs.SMALL, "checkpoint=none", "steps=5", "model.dropout=0.1"], tmp_path)
    runs.train([*runs.SMALL, "checkpoint=none", "steps=5", "model.dropout=0.1", "name=blind"], tmp_path, prepare=close_the_eyes)
    assert "memory" not in runs.facts(tmp_path / "runs/blind")
    assert runs.losses(tmp_path / "runs/run") == runs.losses(tmp_path / "runs/blind")


def close_the_eyes() -> None:
    from framework.trainer import ledger as hook

    hook.WARM = 1000

"""checkpoint.optimizer_dtype in whole runs: smaller files, a resume that is close, and says that it is not exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.runs import PLAIN, SMALL

SLOW = pytest.mark.slow
CASES = [
    pytest.param("bf16", "async", PLAIN, 1, id="plain"),
    *(pytest.param(dtype, mode, [*SMALL, f"zero=stage{stage}"], 2, marks=SLOW, id=f"stage{stage}-{dtype}-{mode}")
      for stage in range(4) for dtype, mode in (("bf16", "sync"), ("fp16", "async"))),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "mode", "words", "ranks"), CASES)
def test_a_run_goes_on_closely_from_rounded_moments(dtype: str, mode: str, words: list[str], ranks: int, tmp_path: Path) -> None:
    words = [*words, "steps=16", f"checkpoint={mode}", "checkpoint.every=8"]
    runs.train([*words, "name=straight"], tmp_path, ranks)
    runs.train([*words, f"checkpoint.optimizer_dtype={dtype}"], tmp_path, ranks)
    straight, run = tmp_path / "runs" / "straight", tmp_path / "runs" / "run"
    assert runs.losses(run) == runs.losses(straight)  # saving changes nothing
    exact, smaller = (runs.events(folder, "checkpoint")[0]["bytes"] for folder in (straight, run))
    assert smaller < 0.7 * exact  # 4 + 2 + 2 of 4 + 4 + 4 bytes, and headers

    again = ["name=run", f"resume={run}/checkpoints/step_00000008", f"checkpoint.optimizer_dtype={dtype}", "steps=17"]
    runs.train([*words, *again], tmp_path, ranks)
    assert "not bit-equal" in runs.events(run, "resume")[0]["moments"]
    resumed, went_on = runs.losses(run), runs.losses(straight)
    losses = [(resumed[step][0], went_on[step][0]) for step in range(10, 17)]
    assert any(one != other for one, other in losses)
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in losses)

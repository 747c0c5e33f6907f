"""Saved under one pipeline degree, loaded under another, through the trainer: masters and moments bit-equal, losses go on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_reshard import reshard, table


class Staged(NamedTuple):
    """ZeRO stage -1 is the plain engine. With `pipeline` 2 on 4 ranks there are two data ranks."""

    stage: int
    ranks: int
    pipeline: int

    def __str__(self) -> str:
        return f"{self.stage} x {self.ranks}" + (f"p{self.pipeline}" if self.pipeline > 1 else "")

    @property
    def words(self) -> list[str]:
        if self.stage < 0:
            return ["engine=plain", "zero=stage0"]
        return [f"zero=stage{self.stage}", f"parallel.pipeline={self.pipeline}"]


PLAIN = Staged(-1, 1, 1)
PIPELINES = [Staged(stage, ranks, 2) for stage in (0, 1) for ranks in (2, 4)]
REST = [PLAIN, Staged(1, 2, 1), Staged(3, 2, 1)]


def prove(folder: Path, save: list[Staged], load: list[Staged]) -> None:
    """Not by the verdict's samples: it expects that no two ranks read the same ones, and the stages of a pipeline do."""
    folder.mkdir()
    verdicts = reshard(folder, save, load)  # type: ignore[arg-type]  (they have what it reads of a Layout)
    print(f"\n{table(verdicts)}")
    assert len(verdicts) == len(save) * len(load)
    assert all(verdict.equal and verdict.drift <= 1e-5 for verdict in verdicts.values())


def test_from_one_process_to_two_stages_and_back(tmp_path: Path) -> None:
    prove(tmp_path / "in", [PLAIN], [Staged(1, 2, 2)])
    prove(tmp_path / "out", [Staged(0, 2, 2)], [PLAIN])


@pytest.mark.slow
def test_every_pair(tmp_path: Path) -> None:
    prove(tmp_path / "within", PIPELINES, PIPELINES)
    prove(tmp_path / "in", REST, PIPELINES)
    prove(tmp_path / "out", PIPELINES, REST)

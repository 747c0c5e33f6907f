"""What a run needs for saving is there before its first step, or all ranks refuse together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.checkpoint import buffers
from framework.checkpoint.buffers import Buffers
from framework.engine.engine import PlainEngine
from tests import runs
from tests.runs import PLAIN, SMALL
from tests.starts import assert_one_letter


def note_the_order() -> None:
    """Write a line to order.txt whenever memory is allocated, and at each step."""
    grow, step = Buffers._grow, PlainEngine.step

    def noted(word: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: object) -> Any:
            with open("order.txt", "a") as file:
                file.write(f"{word}\n")
            return work(*given)

        return run

    Buffers._grow = noted("grow", grow)  # type: ignore[method-assign]
    PlainEngine.step = noted("step", step)  # type: ignore[method-assign]


def test_the_memory_for_saves_is_allocated_once_before_the_first_step(tmp_path: Path) -> None:
    words = [*PLAIN, "checkpoint.optimizer_dtype=bf16", "checkpoint=async", "checkpoint.every=1", "steps=3"]
    runs.train(words, tmp_path, prepare=note_the_order)
    assert (tmp_path / "order.txt").read_text().split() == ["grow", "step", "step", "step"]


def short_of_memory() -> None:
    """The second rank alone finds that its host has too little."""
    if os.environ["RANK"] == "1":
        buffers.free_memory = lambda: 1000


def test_one_rank_without_memory_stops_all_before_the_first_step(tmp_path: Path) -> None:
    text = runs.train([*SMALL, "checkpoint=async", "steps=3"], tmp_path, ranks=2, code=2, prepare=short_of_memory)
    assert_one_letter(text, "1000 bytes", "checkpoint=sync")
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists() or not runs.losses(tmp_path / "runs" / "run")

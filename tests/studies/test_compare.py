"""compare.py on made-up run folders: equal ones, and one for each thing that can differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.studies.compare import COLUMNS, EQUAL, compare, read_trace

STEPS, RANKS = 3, 2
Lines = dict[str, list[dict[str, Any]]]


def lines() -> Lines:
    """What a run of three steps on two ranks writes."""
    at = [(step, rank) for step in range(1, STEPS + 1) for rank in range(RANKS)]
    tensors = [{f"{kind} w{n}": f"{kind}{n} {step} {rank}" for kind in ("master", "live") for n in (1, 2)} for step, rank in at]
    columns = ("weights", "optimizer", "rng", "data")
    hashes = [
        {"step": step, "rank": rank, **{name: f"{name} {step} {rank}" for name in columns}, "tensors": named}
        for (step, rank), named in zip(at, tensors, strict=True)
    ]
    samples = [{"step": step, "data_rank": rank, "micro": micro, "ids": [step, rank, micro]} for step, rank in at for micro in (0, 1)]
    numbers = {"grad_norm": 1.5, "lr": 1e-3, "loss_scale": 1.0, "skipped": False, "applied": 1, "tokens": 64, "samples": 4}
    metrics = [
        {"kind": "train", "step": step, "loss": 5.0 / step, **numbers, "consumed_samples": 4 * step, "step_time_s": 0.25}
        for step in range(1, STEPS + 1)
    ]
    metrics.append({"kind": "eval", "step": 2, "loss": 4.5, "tokens": 64, "samples": 4, "time_s": 1.0})
    return {"hashes": hashes, "samples": samples, "metrics": metrics}


def write(folder: Path, content: Lines) -> Path:
    folder.mkdir()
    for name, rows in content.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compared(tmp_path: Path, change: Callable[[Lines], object]) -> dict[str, str]:
    """What differs, in the run whose lines `change` has changed; columns that are equal left out."""
    changed = lines()
    change(changed)
    straight, other = read_trace(write(tmp_path / "straight", lines())), read_trace(write(tmp_path / "other", changed))
    said = compare(straight, other, STEPS, RANKS)
    assert tuple(said) == COLUMNS
    return {name: words for name, words in said.items() if words != EQUAL}


def changed(file: str, row: int, **values: Any) -> Callable[[Lines], object]:
    return lambda content: content[file][row].update(values)


def add_step_4(content: Lines) -> None:
    content["samples"].append({"step": 4, "data_rank": 0, "micro": 0, "ids": [1]})


def test_the_same_lines_are_equal(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda content: None) == {}


def test_times_are_not_compared(tmp_path: Path) -> None:
    assert compared(tmp_path, changed("metrics", 0, step_time_s=9.0)) == {}


# Row 3 of hashes.jsonl is step 2, rank 1.
@pytest.mark.parametrize(
    ("column", "change", "expected"),
    [
        ("rng", changed("hashes", 3, rng="x"), "differs at step 2, rank 1"),
        ("data", changed("hashes", 4, data="x"), "differs at step 3, rank 0"),
        (
            "weights",
            changed("hashes", 3, weights="x", tensors={"master w1": "x", "live w1": "live1 2 1", "live w2": "x"}),
            "differs at step 2, rank 1: live w2",
        ),
        (
            "optimizer",
            changed("hashes", 3, optimizer="x", tensors={"live w1": "x", "master w1": "master1 2 1", "master w2": "x"}),
            "differs at step 2, rank 1: master w2",
        ),
        ("optimizer", changed("hashes", 3, optimizer="x"), "differs at step 2, rank 1: a counter of the optimizer or the loss scaler"),
        ("samples", changed("samples", 5, ids=[7]), "differs at step 2, rank 0: micro-batch 1 read [7] instead of [2, 0, 1]"),
        ("metrics", changed("metrics", 1, lr=2e-3), "differs at step 2, rank 0: lr 0.002 instead of 0.001"),
        ("metrics", changed("metrics", 1, grad_norm="nan"), "differs at step 2, rank 0: grad_norm nan instead of 1.5"),
        ("metrics", changed("metrics", 1, loss=2.5000000000000004), "differs at step 2, rank 0: loss 2.5000000000000004 instead of 2.5"),
        ("metrics", changed("metrics", 3, loss=4.25), "differs at step 2, rank 0: held-out loss 4.25 instead of 4.5"),
        ("rng", lambda content: content["hashes"].pop(3), "step 2, rank 1 is missing in this run"),
        ("metrics", lambda content: content["metrics"].pop(2), "step 3, rank 0 is missing in this run"),
        ("samples", add_step_4, "step 4, rank 0 is missing in the straight run"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, column: str, change: Callable[[Lines], object], expected: str) -> None:
    assert compared(tmp_path, change)[column] == expected


def test_of_several_differences_the_first_step_and_rank_is_told(tmp_path: Path) -> None:
    def change(content: Lines) -> None:
        for row in (5, 2, 3):
            content["hashes"][row]["rng"] = "x"

    assert compared(tmp_path, change) == {"rng": "differs at step 2, rank 0"}


def test_of_a_step_that_was_done_twice_the_last_line_holds(tmp_path: Path) -> None:
    def redo(content: Lines) -> None:
        again = dict(content["hashes"][4])
        content["hashes"][4]["weights"] = "of a step that was lost"
        content["hashes"].append(again)

    assert compared(tmp_path, redo) == {}


def test_a_torn_line_does_not_count(tmp_path: Path) -> None:
    straight, torn = write(tmp_path / "straight", lines()), write(tmp_path / "torn", lines())
    with open(torn / "hashes.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rank": 1, "weights": "half a')
    assert set(compare(read_trace(straight), read_trace(torn), STEPS, RANKS).values()) == {EQUAL}
    whole = (torn / "hashes.jsonl").read_bytes().splitlines(keepends=True)
    (torn / "hashes.jsonl").write_bytes(b"".join(whole[:-2]) + whole[-2][:-20])
    assert compare(read_trace(straight), read_trace(torn), STEPS, RANKS)["rng"] == "step 3, rank 1 is missing in this run"


def test_two_runs_that_wrote_nothing_are_not_equal(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    said = compare(read_trace(tmp_path / "one"), read_trace(tmp_path / "one"), STEPS, RANKS)
    assert set(said.values()) == {"step 1, rank 0 is missing in the straight run"}

"""Memory that runs out: the letter that names the book, and batch.micro_size=auto, which finds what fits and keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.config.compose import compose
from framework.planner import memory, remedies, sizing
from framework.planner.activations import CPU
from framework.planner.ledger import Ledger
from framework.topology.grid import Grid
from framework.trainer.shortage import blamed, is_shortage
from tests import runs

LONG = ["data.seq_length=512", "model.max_positions=512", "batch.global_size=16", "checkpoint=sync", "data.synthetic_tokens=20000"]
GIB = 2**30


def test_a_run_that_takes_too_much_ends_with_the_book_that_was_too_large(tmp_path: Path) -> None:
    words = [*runs.SMALL, *LONG, "zero=stage0", "model.hidden_size=128", "model.num_layers=8"]
    text = runs.train([*words, "batch.micro_size=16", "limits.memory_gib=0.1", "steps=3"], tmp_path, code=1)
    assert "memory of rank 0" in text
    assert "activations too large by" in text
    assert "batch.micro_size=2 " in text or "batch.micro_size=4 " in text or "batch.micro_size=1 " in text
    assert "Traceback" not in text
    assert runs.facts(tmp_path / "runs/run")["status"] == "failed"
    assert text.count("(saves ") == 3
    runs.train([*words, "batch.micro_size=1", "limits.memory_gib=0.1", "steps=1"], tmp_path)  # what fits runs


@pytest.mark.slow
def test_auto_takes_what_fits_and_holds_to_it(tmp_path: Path) -> None:
    words = [*runs.PLAIN, *LONG, "batch.micro_size=auto"]
    runs.train([*words, "limits.memory_gib=0.01", "steps=2"], tmp_path)
    run = tmp_path / "runs/run"
    first = runs.facts(run)["resolved"]["batch.micro_size"]
    assert 1 <= first < 16
    runs.train([*words, "limits.memory_gib=0.5", "steps=4"], tmp_path)
    assert runs.facts(run)["resolved"]["batch.micro_size"] == first
    runs.train([*words, "limits.memory_gib=0.5", "steps=1", "resume=never"], tmp_path)
    assert runs.facts(run)["resolved"]["batch.micro_size"] == 16


def test_all_ranks_take_the_same(tmp_path: Path) -> None:
    """One rank has less room than the other."""
    words = [*runs.SMALL, *LONG, "batch.micro_size=auto", "zero=stage1", "steps=2", "data.log_samples=true"]
    runs.train(words, tmp_path, ranks=2, prepare=less_room_on_rank_1)
    assert runs.facts(tmp_path / "runs/run")["resolved"]["batch.micro_size"] == 2
    micros = [line["ids"] for line in map(json.loads, (tmp_path / "runs/run/samples.jsonl").read_text().splitlines())]
    assert {len(ids) for ids in micros} == {2}


def less_room_on_rank_1() -> None:
    import os

    from framework.trainer import sizing as trainer_sizing

    config = compose([*runs.SMALL, *LONG, "batch.micro_size=2", "zero=stage1"])
    just_two = memory.fullest(config, Grid(data=2), CPU).peak
    trainer_sizing.room = lambda *_: just_two if os.environ["RANK"] == "1" else 2 * GIB  # type: ignore[assignment]


def test_nothing_fits_is_refused(tmp_path: Path) -> None:
    text = runs.train([*runs.PLAIN, *LONG, "batch.micro_size=auto", "limits.memory_gib=0.001", "steps=1"], tmp_path, code=2)
    assert "one sample takes" in text


def test_candidates_divide_a_data_ranks_share() -> None:
    config = compose(["recipe=tiny", "batch.global_size=24", "batch.micro_size=auto"])
    assert list(sizing.candidates(config, Grid(data=2))) == [12, 6, 4, 3, 2, 1]


@pytest.mark.parametrize("micro", [1, 2, 4, 12])
def test_the_largest_that_fits_is_the_largest(micro: int) -> None:
    config = compose(["recipe=tiny", "batch.global_size=24", "batch.micro_size=auto"])
    need = memory.fullest(sizing.with_micro(config, micro), Grid(data=2), CPU).peak
    assert sizing.largest(config, Grid(data=2), need, CPU) == micro
    assert (sizing.largest(config, Grid(data=2), need - 1, CPU) or 0) < micro


def test_remedies_fit_and_are_accepted() -> None:
    config = compose(["recipe=tiny", "batch.micro_size=16", "data.seq_length=512", "model.num_layers=6"])
    now = memory.fullest(config, Grid(data=2), CPU).peak
    found = remedies.cheapest(config, Grid(data=2), 2, now * 0.6, CPU)
    assert len(found) == 3
    for remedy in found:
        changed = compose(["recipe=tiny", "data.seq_length=512", "model.num_layers=6", "batch.micro_size=16", *remedy.write.split()])
        peak = memory.fullest(changed, Grid(data=2), CPU).peak
        assert now - peak == remedy.saves > 0
        assert remedy.fits == (peak <= now * 0.6)


def test_the_book_that_is_blamed_is_the_one_still_to_come() -> None:
    paper = Ledger({"parameters": 100, "activations": 80, "logits": 30}, {}, {})
    assert blamed(paper, {"parameters": 100}) == "activations"
    assert blamed(paper, {}) == "parameters"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_what_counts_as_a_lack_of_memory(error: Exception, expected: bool) -> None:
    assert is_shortage(error) == expected

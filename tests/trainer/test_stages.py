"""Whole trainings on two pipeline stages: what they write about the stages, and that what was measured holds at a later start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

WORDS = [*runs.SMALL, "parallel=pipeline2", "model.num_layers=4", "data.log_samples=true", "eval.every=3", "eval.samples=4"]
WORDS += ["model.vocab_size=256", "data.text=bytes", "monitor.sample_tokens=3", "monitor.console=plain", "checkpoint=sync"]


OTHER = [[0, 1], [1, 4]]


def resolved(run: Path) -> Any:
    return runs.facts(run)["resolved"]["parallel.partition"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with a measured cut, in two starts."""
    folder = tmp_path_factory.mktemp("stages")
    runs.train([*WORDS, "steps=5", "parallel.partition=measured"], folder, ranks=2)
    facts = runs.facts(folder / "runs/run")
    assert facts["resolved"]["parallel.partition"]
    facts["resolved"]["parallel.partition"] = OTHER
    (folder / "runs/run/run.json").write_text(json.dumps(facts))
    runs.train([*WORDS, "steps=10", "parallel.partition=measured"], folder, ranks=2)
    return folder / "runs/run"


def test_the_stages_of_one_step_of_each_start_are_told(run: Path) -> None:
    events = runs.events(run, "pipeline")
    assert [event["step"] for event in events] == [5, 10]
    for event in events:
        assert event["bubble_formula"] == pytest.approx(1 / 5)  # two stages, four micro-batches
        assert 0 <= event["bubble"] < 1
        assert len(event["stages"]) == 2
        for stage in event["stages"]:
            assert stage["forward_s"] > 0
            assert stage["backward_s"] > 0


def test_what_was_measured_holds(run: Path) -> None:
    """The second start found another cut in run.json than it would have measured, and took it."""
    assert resolved(run) == OTHER
    first, second = (event["stages"] for event in runs.events(run, "pipeline"))
    assert [stage["blocks"] for stage in second] == OTHER
    assert first[0]["blocks"][0] == 0
    assert first[0]["blocks"][1] == first[1]["blocks"][0]
    assert first[1]["blocks"][1] == 4


def test_samples_are_logged_once_and_evaluation_is_recorded(run: Path) -> None:
    ids = [index for line in runs.lines(run / "samples.jsonl") for index in line["ids"]]
    assert sorted(ids) == list(range(4 * 10))
    assert [line["step"] for line in runs.lines(run / "metrics.jsonl") if line["kind"] == "eval"] == [3, 5, 6, 9, 10]


def test_few_micro_batches_are_a_warning_with_the_bubble(tmp_path: Path) -> None:
    runs.train([*WORDS, "steps=1", "batch.micro_size=4"], tmp_path, ranks=2)
    said = (tmp_path / "runs/run/logs/rank_0.log").read_text()
    assert "WARNING" in said
    assert "1 micro-batches for 2 stages: 50 % of each step is bubble" in said

"""framework.plan as a user calls it: the page, the object, refusals, models built without memory, layouts really run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from framework import plan
from framework.config import parameters
from framework.config.compose import compose
from framework.planner.page import WIDTH
from framework.topology.grid import Grid
from tests.ranks import Job, launch, run_ranks
from tests.starts import assert_one_letter

SEARCH = ["recipe=tiny", "plan.world_size=2", "plan.search=true"]


def said(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and output of `python -m framework.plan WORDS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["plan", *words])
    code = plan.main()
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def answer(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    code, text = said([*words, "plan.format=json"], capsys, monkeypatch)
    assert code == 0, text
    return json.loads(text)


def test_the_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(["recipe=llama_8b", "plan.world_size=64", "plan.hardware=h100_80gb"], capsys, monkeypatch)
    assert found["batch"] == {"global_size": 512, "micro_size": 1, "data_ranks": 64, "accumulation_steps": 8, "tokens": 512 * 8192}
    assert found["layout"]["ranks_per_host"] == 8
    count = parameters.count(compose(["recipe=llama_8b"]).model)
    assert found["ledger"]["moments"] == pytest.approx(8 * count / 64, rel=1e-3)  # ZeRO-3: two fp32 moments, divided
    assert found["ledger"]["parameters"] == pytest.approx(2 * count / 64, rel=1e-3)
    assert found["dtypes"]["moments"] == found["dtypes"]["masters"] == "fp32"
    assert found["dtypes"]["parameters"] == "bf16"
    parts = {part: took for part, took in found["time"].items() if part != "step"}
    assert sum(parts.values()) == pytest.approx(found["time"]["step"])
    assert found["verdict"]["fits"] is True
    assert found["verdict"]["device_limit"] == 64 * 10**9
    assert found["advice"] == []


def test_what_does_not_fit_is_no_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(["recipe=llama2_70b", "plan.world_size=128", "plan.hardware=a100_40gb"], capsys, monkeypatch)
    assert found["verdict"]["fits"] is False
    assert found["verdict"]["device_bytes"] > found["verdict"]["device_limit"] == 32 * 10**9
    assert set(found["advice"][0]) >= {"what", "write", "saves", "costs"}
    assert any(entry["fits"] for entry in found["advice"])


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=tiny", "plan.world_size=2"],
        ["recipe=llama_8b", "plan.world_size=8", "plan.hardware=a100_40gb", "precision=fp32"],
        ["recipe=llama2_70b", "plan.world_size=128", "plan.hardware=h100_80gb"],
        ["recipe=gpt2_124m", "plan.world_size=8", "plan.hardware=l40s_48gb"],
        [*SEARCH, "plan.show=30"],
    ],
    ids=" ".join,
)
def test_the_page_fits_a_terminal(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = said(words, capsys, monkeypatch)
    assert code == 0
    assert max(map(len, text.splitlines())) <= WIDTH
    for part in ("layout", "batch", "memory of the fullest rank", "time of a step", "verdict", "advice"):
        assert any(line.startswith(part) for line in text.splitlines()), part


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan.hardware=h10080gb"], ["plan.hardware", "h10080gb", "plan.hardware=h100_80gb"]),
        (["recipe=llama2_70b", "plan.world_size=100", "plan.hardware=h100_80gb"], ["parallel", "100 ranks", "tensor 8 x pipeline 16"]),
        (["recipe=tiny", "plan.world_size=3"], ["batch.global_size", "data 3"]),
        (["plan.world_size=0"], ["plan.world_size", "1 or more"]),
        (["plan.format=xml"], ["plan.format", "xml", "plan.format="]),
        (["plan.explain=true"], ["plan.explain", "plan.search=true"]),
        ([*SEARCH, "plan.hardware=h100_80gb", "plan.probe=2"], ["plan.probe", "plan.hardware=auto"]),
        ([*SEARCH, "plan.write=mine.txt"], ["plan.write", "mine.txt", "plan.write=recipes/mine.yaml"]),
        (["plan.serch=true"], ["plan.serch", "plan.search"]),
        (["recipe=llama2_70b", "plan.world_size=128", "plan.ranks_per_host=4"], ["parallel.tensor", "4 ranks per host"]),
    ],
    ids=lambda given: " ".join(given),
)
def test_refusals(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = said(words, capsys, monkeypatch)
    assert code == 2
    assert_one_letter(text, *parts)


def test_a_search_says_the_first_and_why_not_the_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer([*SEARCH, "plan.show=3", "plan.explain=true"], capsys, monkeypatch)
    assert len(found["candidates"]) == 3
    first = found["candidates"][0]
    assert first["seconds"] == pytest.approx(found["time"]["step"])
    assert (first["data"], first["micro_size"]) == (found["layout"]["data"], found["batch"]["micro_size"])
    assert sum(branch["layouts"] for branch in found["rejected"]) + found["searched"]["feasible"] == found["searched"]["layouts"]
    assert any("[pipeline_zero]" in branch["reason"] for branch in found["rejected"])


def test_a_recipe_of_other_ranks_can_be_searched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own degrees, 8 x 16, do not go into 64."""
    words = ["recipe=llama2_70b", "plan.world_size=64", "plan.hardware=h200_141gb", "plan.search=true", "model.num_layers=16"]
    assert answer(words, capsys, monkeypatch)["layout"]["ranks"] == 64


def test_nothing_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["recipe=llama2_70b", "plan.world_size=1", "plan.hardware=l40s_48gb", "plan.search=true"]
    assert answer(words, capsys, monkeypatch)["candidates"] == []
    code, text = said(words, capsys, monkeypatch)
    assert code == 0
    assert "0 fit" in text


def test_a_written_recipe_is_the_first_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipe"
    folder.mkdir()
    found = answer([*SEARCH, f"plan.write={folder / 'mine.yaml'}"], capsys, monkeypatch)
    config = compose(["recipe=mine"], extra=tmp_path)
    assert (config.batch.micro_size, config.zero.stage) == (found["batch"]["micro_size"], found["layout"]["zero"])
    assert f"{found['time']['step']:.3g} s per step" in (folder / "mine.yaml").read_text()


def test_a_plan_needs_no_torch() -> None:
    code = "import sys; from framework.plan import main; main(); assert not {'torch', 'deepspeed', 'numpy'} & set(sys.modules)"
    words = [sys.executable, "-c", code, "recipe=tiny", "plan.world_size=2", "plan.search=true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- with torch


def built(rank: int, ranks: int, words: list[str], grid: Grid) -> dict[str, Any]:
    from framework.studies.outlines import hold_against_ledger

    return hold_against_ledger(compose(words), grid)


@pytest.mark.parametrize(
    ("words", "grid"),
    [
        (["recipe=tiny"], Grid()),
        (["recipe=tiny", "parallel=tensor2_pipeline2"], Grid(2, 1, 1, 2)),
        (["recipe=gpt2_124m", "parallel.tensor=2", "parallel.context=2", "parallel.sequence=true"], Grid(1, 2, 2, 2)),
        (["recipe=llama2_70b"], Grid(16, 1, 1, 8)),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_models_built_without_memory_are_those_of_the_ledger(words: list[str], grid: Grid) -> None:
    [found] = run_ranks(built, 1, words, grid, timeout=120)
    config = compose(words)
    element = 2 if config.precision.half_weights else 4
    whole = sum(found["parameter_bytes"]) * grid.tensor
    padded = -(-config.model.vocab_size // grid.tensor) * grid.tensor - config.model.vocab_size
    copies = config.model.tie_embeddings and grid.pipeline > 1
    least = element * parameters.count(config.model)
    assert least <= whole  # whole vectors stand on every tensor rank
    rows = config.model.vocab_size * copies + padded * (2 if copies or not config.model.tie_embeddings else 1)
    vectors = (grid.tensor - 1) * config.model.num_layers * 8 * config.model.ffn_hidden_size
    positions = config.model.max_positions * (grid.tensor - 1) if config.model.position == "learned" else 0
    assert whole <= least + element * ((rows + positions) * config.model.hidden_size + vectors)


def wrongly_built(rank: int, ranks: int) -> str:
    """What is said when the Ledger has another model."""
    from unittest import mock

    from framework.base.errors import RunError
    from framework.planner.states import rank_of
    from framework.studies import outlines

    def other(config: Any, grid: Grid, stage: int, bounds: Any) -> Any:
        return rank_of(compose(["recipe=tiny", "model.ffn_hidden_size=392"]), grid, stage, bounds=bounds)

    with mock.patch.object(outlines, "rank_of", other), pytest.raises(RunError) as error:
        outlines.hold_against_ledger(compose(["recipe=tiny"]), Grid())
    return error.value.letter()


def test_a_difference_is_named() -> None:
    [letter] = run_ranks(wrongly_built, 1, timeout=120)
    assert "stage 0" in letter
    assert str(128 * 384) in letter


PROBE = ["framework.plan", *SEARCH, "batch.global_size=4", "batch.micro_size=2", "data.seq_length=16", "data=synthetic", "data.workers=0"]
PROBE += ["monitor.sample_tokens=0"]


@pytest.mark.slow
def test_layouts_are_really_run(tmp_path: Path) -> None:
    done = launch([*PROBE, "plan.probe=2", "plan.format=json", "plan.show=4"], None, tmp_path, 400)
    assert done.code == 0, done.stderr
    probed = json.loads(done.stdout)["probe"]
    assert len(probed) == 2
    for each in probed:
        assert each["measured"] > 0
        assert each["measured_over_estimate"] == pytest.approx(each["measured"] / each["seconds"])
    assert not done.left_behind


@pytest.mark.slow
def test_no_rank_outlives_a_probe(tmp_path: Path) -> None:
    with Job([*PROBE, "plan.probe=1"], None, tmp_path) as job:
        deadline = time.monotonic() + 200
        while not any("--frozen" in process.cmdline() for process in job.processes()):
            assert job.running(), job.output()
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.05)
        [first] = [process for process in job.processes() if "framework.plan" in process.cmdline()]
        first.send_signal(signal.SIGTERM)
        done = job.wait(60)
    assert done.code == 128 + signal.SIGTERM
    assert not done.left_behind

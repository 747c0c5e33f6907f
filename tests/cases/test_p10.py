"""P10 (khanrc/honeybee#24): the launcher's --local_rank and Hydra's command line have one parser, and nobody stumbles.

Whatever way a rank learns its number, its config is that of a plain single start. Sweeps are tested where they are built.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import yaml

from framework.config.schema import Config
from framework.trainer.folder import read_config
from tests.ranks import launch
from tests.starts import Started, assert_one_letter, start

WORDS = ["recipe=tiny", "zero=stage2", "optimizer.lr=1e-4"]
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
IN_ENVIRONMENT = {**RANK_1, "LOCAL_RANK": "1"}
FORMS = {
    "underscore": (["--local_rank=1", *WORDS], RANK_1),
    "dash": (["--local-rank=1", *WORDS], RANK_1),
    "underscore, two words": (["--local_rank", "1", *WORDS], RANK_1),
    "dash, two words": (["--local-rank", "1", *WORDS], RANK_1),
    "environment only": (WORDS, IN_ENVIRONMENT),
    "flag and environment agree": (["--local_rank=1", *WORDS], IN_ENVIRONMENT),
    "flag behind the overrides": ([*WORDS, "--local_rank=1"], RANK_1),
    "flag between the overrides": ([WORDS[0], "--local-rank", "1", *WORDS[1:]], RANK_1),
}


def plain_config() -> Config:
    given = start(WORDS).given
    assert given is not None
    return given.config


@pytest.mark.parametrize("form", FORMS)
def test_config_and_rank_are_right_however_the_number_comes(form: str) -> None:
    words, environment = FORMS[form]
    started = start(words, environment)
    assert started.code == 0
    assert started.given is not None
    assert started.given.config == plain_config()
    process = started.given.process
    assert (process.rank, process.local_rank, process.ranks, process.ranks_per_host) == (1, 1, 2, 2)


def test_a_plain_start_is_the_only_rank() -> None:
    given = start(WORDS).given
    assert given is not None
    assert (given.process.rank, given.process.ranks, given.config.zero.stage) == (0, 1, 2)


@pytest.mark.parametrize("flag", [["--local_rank=0"], ["--local-rank=0"], ["--local_rank", "0"]])
def test_disagreement_is_refused(flag: list[str]) -> None:
    with mock.patch("time.sleep"):
        started = start([*WORDS, *flag], IN_ENVIRONMENT)
    assert (started.code, started.given) == (2, None)
    assert_one_letter(started.text, "LOCAL_RANK", "rank 1: ", "1 in the environment", "--local_rank=0")


@pytest.mark.parametrize("flag", [["--local_rank=zero"], ["--local_rank="], ["--local_rank"], ["--local_rank=-1"]])
def test_a_flag_that_is_no_number_is_refused(flag: list[str]) -> None:
    started = start([*WORDS, *flag])
    assert (started.code, started.given) == (2, None)
    assert_one_letter(started.text, "--local_rank", "a number")


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_a_sweep_inside_a_rank_is_refused(flag: str) -> None:
    started = start([flag, *WORDS, "seed=1,2"], {**IN_ENVIRONMENT, "RANK": "0", "LOCAL_RANK": "0"})
    assert (started.code, started.given) == (2, None)
    assert_one_letter(started.text, "a sweep inside a rank")


@pytest.mark.parametrize("words", [["--cfg", "job", *WORDS], [*WORDS, "--cfg", "job"], [WORDS[0], "--cfg", "job", *WORDS[1:]]])
def test_the_shown_config_does_not_depend_on_the_flag(words: list[str]) -> None:
    def shown(started: Started) -> object:
        assert started.code == 0, started.text
        return yaml.safe_load(started.text)

    rank_0 = {**IN_ENVIRONMENT, "RANK": "0", "LOCAL_RANK": "0"}
    assert shown(start(["--local_rank=0", *words], rank_0)) == shown(start(["--cfg", "job", *WORDS]))


def test_only_the_first_rank_shows_the_config() -> None:
    started = start(["--local_rank=1", "--cfg", "job", *WORDS], IN_ENVIRONMENT)
    assert (started.code, started.text) == (0, "")


@pytest.mark.slow
def test_the_deepspeed_launcher_trains_with_the_plain_config(tmp_path: Path) -> None:
    words = ["recipe=tiny", "steps=2", "zero=stage2", "batch.micro_size=4", "data.seq_length=16", "eval.every=-1"]
    words += ["monitor.sample_tokens=0", "output_root=runs", f"data.cache={tmp_path}/data", "data.workers=0"]
    completed = launch(["framework.train", *words], ranks=2, cwd=tmp_path, timeout=120)
    assert completed.code == 0, completed.stderr
    plain = start(words).given
    assert plain is not None
    assert read_config(tmp_path / "runs/tiny/config.yaml") == plain.config
    assert {path.name for path in (tmp_path / "runs/tiny/logs").glob("rank_*")} == {"rank_0.log", "rank_1.log"}
    assert not completed.left_behind

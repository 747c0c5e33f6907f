"""command.py: what a start consists of; words as Hydra reads them back."""

from __future__ import annotations

import sys

import pytest

from framework.config.compose import compose
from framework.launch.command import LAUNCHER_SETS, ranks_to_start, run_command, run_environment, word


def test_one_rank_needs_no_launcher() -> None:
    assert run_command(["recipe=tiny"], 1, 29500) == [sys.executable, "-m", "framework.train", "recipe=tiny"]


def test_several_ranks_are_started_by_deepspeed() -> None:
    command = run_command(["recipe=tiny", "steps=3"], 4, 29501, "some.module")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "4", "--master_port", "29501"]
    assert command == [*launcher, "--module", "some.module", "recipe=tiny", "steps=3"]


def test_the_environment_makes_nobody_a_rank() -> None:
    given = {**dict.fromkeys(LAUNCHER_SETS, "1"), "PATH": "/bin", "WANDB_MODE": "offline"}
    assert run_environment(given) == {"PATH": "/bin", "WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    ("words", "ranks"),
    [([], 2), (["launch.num_procs=1"], 1), (["parallel=tensor2_pipeline2"], 4), (["parallel=tensor2", "launch.num_procs=4"], 4)],
)
def test_ranks(words: list[str], ranks: int) -> None:
    assert ranks_to_start(compose(words)) == ranks


@pytest.mark.parametrize(
    "text", ["plain", "", "/a folder/with, commas=and [brackets]", "it's", "back\\slash", "ends in \\", "\\'", "null", "12"]
)
def test_text_comes_back_as_it_was(text: str) -> None:
    assert compose([word("output_root", text)]).output_root == text


def test_other_values_come_back_as_they_were() -> None:
    words = [word("optimizer.lr", 1e-05), word("data.shuffle", False), word("data.workers", None), word("steps", 7)]
    config = compose([*words, word("data.files", ["a b", "c"])])
    assert (config.optimizer.lr, config.data.shuffle, config.data.workers, config.steps) == (1e-05, False, None, 7)
    assert config.data.files == ("a b", "c")

"""The README's commands do what it says, and the files that it names are there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT, launch

TEXT = (ROOT / "README.md").read_text()


def commands() -> list[list[str]]:
    """Every command line of the README's sh blocks, as words, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


TRAIN = [words for words in commands() if words[0] != "make" and "--help" not in words]


SHORT = {
    "framework.train": ["steps=2", "eval.samples=8", "monitor.sample_tokens=0"],
    "framework.verify": ["verify.steps=2"],
    "framework.plan": [],
}


def test_there_are_commands_to_run() -> None:
    assert len(TRAIN) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_train_commands_run(words: list[str], tmp_path: Path) -> None:
    ranks = int(words[words.index("--num_gpus") + 1]) if words[0] == "deepspeed" else None
    at = next(at for at, word in enumerate(words) if word.startswith("framework."))
    done = launch([*words[at:], *SHORT[words[at]]], ranks, cwd=tmp_path, timeout=600)
    assert done.code == 0, done.stderr
    assert (tmp_path / "runs").is_dir() or words[at] == "framework.plan"


@pytest.mark.parametrize("target", sorted({words[1] for words in commands() if words[0] == "make"}))
def test_make_targets_exist(target: str) -> None:
    dry = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_linked_files_exist(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_recipe_shown_is_the_recipe_shipped() -> None:
    shown = re.search(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert shown is not None
    shipped = (ROOT / "recipes" / "tiny.yaml").read_text()
    for line in shown.group(1).splitlines():
        setting = line.split(" # ")[0].rstrip()
        assert setting in shipped, f"README shows {setting!r}, recipes/tiny.yaml does not have it"

"""Every shipped recipe: a header that a person and this test can read, and settings that compose, pass the rules and compile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from framework.config import parameters
from framework.config.check import check
from framework.config.compose import ROOT, compose
from framework.config.schema import Config
from framework.engine.dsconfig import deepspeed_config
from framework.model.transformer import Transformer
from framework.trainer.build import accumulation_steps, make_grid

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SHIPPED = {"tiny", "kjv", "gpt2_124m", "llama_1b", "llama_8b", "llama_8b_128k", "llama2_70b"}
HEADER = ("Goal", "Hardware", "Ranks", "Command", "Expected", "Date")


def header(recipe: Path) -> dict[str, str]:
    """`# Key         what it says`, a line each; a line without a key goes on with the one above."""
    found: dict[str, str] = {}
    key = ""
    for line in recipe.read_text().splitlines():
        if match := re.fullmatch(r"# ([A-Z]\w+) {2,}(\S.*)", line):
            key = match[1]
            found[key] = match[2]
        elif key and (more := re.fullmatch(r"# {5,}(\S.*)", line)):
            found[key] += f" {more[1]}"
    return found


def composed(recipe: Path) -> tuple[Config, int]:
    """The config of the header's last command, without what a sweep varies, on the ranks that the header names."""
    words = shlex.split(header(recipe)["Command"].split("framework.train")[-1])
    fixed = [word for word in words if word != "-m" and not word.startswith("hydra") and "(" not in word]
    return compose(fixed), int(header(recipe)["Ranks"])


def test_the_promised_recipes_are_there() -> None:
    assert {recipe.stem for recipe in RECIPES} >= SHIPPED


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_header(recipe: Path) -> None:
    found = header(recipe)
    assert tuple(key for key in found if key in HEADER) == HEADER, "in this order"
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["Date"])
    assert f"recipe={recipe.stem}" in found["Command"]
    assert recipe.read_text().startswith("# @package _global_\n")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_composes_checks_and_compiles(recipe: Path) -> None:
    config, ranks = composed(recipe)
    check(config, ranks, min(ranks, 8))
    assert config.name == recipe.stem
    grid = make_grid(config, ranks)
    assert grid.size == ranks
    accumulation = accumulation_steps(config, grid)
    assert accumulation * config.batch.micro_size * grid.data == config.batch.global_size
    settings = deepspeed_config(config, grid.data * grid.context, accumulation)
    assert settings["train_batch_size"] == config.batch.global_size * grid.context
    assert settings["zero_optimization"]["stage"] == config.zero.stage
    enabled = [name for name in ("fp16", "bf16") if settings[name]["enabled"]]
    assert enabled == ([config.precision.dtype] if config.precision.half_weights else [])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_model_has_the_parameters_of_the_table(recipe: Path) -> None:
    model = composed(recipe)[0].model
    with torch.device("meta"):
        live = {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
    assert live == {entry.name: entry.shape for entry in parameters.table(model) if entry.tied_to is None}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_starts_on_one_process_as_well(recipe: Path) -> None:
    """Nothing in a recipe ties it to a number of ranks but the degrees of its layout."""
    config, _ = composed(recipe)
    ranks = config.parallel.model_ranks
    check(config, ranks, min(ranks, 8))

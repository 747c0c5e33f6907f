"""A config that was written as a recipe composes to the same config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from framework.base.errors import ConfigError
from framework.config.compose import ROOT, compose
from framework.config.identity import changes
from framework.config.schema import Config, Recompute
from framework.planner.recipe import APART, Header, name_of, recipe_text
from framework.planner.search import Layout
from framework.topology.grid import Grid
from tests.test_recipes import HEADER, header

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
HEAD = Header("g", "h", 8, 1, "e", "2026-12-01")
LAYOUTS = [
    Layout(Grid(2, 2, 1, 2), True, 1, "none", Recompute(), 2),
    Layout(Grid(1, 8, 1, 1), False, 3, "cpu", Recompute("full", every=4), 1),
    Layout(Grid(1, 2, 4, 1), False, 2, "none", Recompute("selective", modules=("norm", "activation")), 1),
    Layout(Grid(1, 1, 1, 8), False, 0, "none", Recompute("full"), 1),
]


def written(config: Config, folder: Path, name: str = "mine", head: Header = HEAD) -> Path:
    path = folder / "recipe" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(recipe_text(config, name, head))
    return path


def differences(one: Config, other: Config) -> list[str]:
    return [change.key for change in changes(one, other) if change.key.split(".")[0] not in APART]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_composes_to_the_same_config(recipe: str, tmp_path: Path) -> None:
    for layout in LAYOUTS:
        config = layout.of(compose([f"recipe={recipe}"]))
        written(config, tmp_path)
        again = compose(["recipe=mine"], extra=tmp_path)
        assert again.name == "mine"
        assert differences(config, again) == []


def test_every_leaf_can_be_written(tmp_path: Path) -> None:
    """Settings that no recipe of ours touches, among them texts, lists and null."""
    words = ["recipe=kjv", "optimizer=sgd", "optimizer.momentum=0.9", "schedule.total_steps=77", "data.cache=/elsewhere", "seed=9"]
    words += ["precision=fp16", "precision.initial_scale_power=8", "checkpoint.root='s3://b/c d'", "limits.wall_time=1e3"]
    config = compose([*words, "model.num_kv_heads=null", "model.norm_eps=1e-7"])
    written(config, tmp_path)
    assert differences(config, compose(["recipe=mine"], extra=tmp_path)) == []


def test_it_has_a_header_and_no_more_than_is_needed(tmp_path: Path) -> None:
    config = LAYOUTS[0].of(compose(["recipe=llama_8b"]))
    path = written(config, tmp_path, head=replace(HEAD, ranks=64, hosts=8))
    found = header(path)
    assert tuple(found) == HEADER
    assert found["Command"] == "deepspeed --hostfile HOSTFILE --module framework.train recipe=mine"
    assert path.read_text().startswith("# @package _global_\n")
    said = yaml.safe_load(path.read_text())
    assert {"override /model": "llama_8b"} in said["defaults"]
    assert "model" not in said
    assert said["parallel"] == {"pipeline": 2} or {"override /parallel": "tensor2_pipeline2"} in said["defaults"]


def test_names_and_files_that_are_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").touch()
    assert name_of(tmp_path / "a_new-one.yaml") == "a_new-one"
    for wrong in (tmp_path / "old.yaml", tmp_path / "a.yml", tmp_path / "a b.yaml"):
        with pytest.raises(ConfigError):
            name_of(wrong)

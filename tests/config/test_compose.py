"""From words to a Config: every choice of every group, the types of the schema, and the letters for what is refused."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from framework.base.errors import ConfigError
from framework.config.compose import CONF, build, compose, leaves, to_dict, type_name
from framework.config.schema import Config

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "recipe"))
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
TYPOS = [("sede", "seed"), ("zero.ofload", "zero.offload"), ("optimizer.weight_decya", "optimizer.weight_decay")]


@cache
def default_config() -> Config:
    return compose([])


def refused(words: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return caught.value


def test_the_groups_are_the_contracts() -> None:
    promised = "model data precision zero parallel recompute optimizer schedule checkpoint monitor profile adapter"
    assert sorted(promised.split()) == GROUPS


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_every_choice_composes_and_changes_its_own_block_only(group: str, choice: str) -> None:
    config, default = compose([f"{group}={choice}"]), default_config()
    for block in dataclasses.fields(Config):
        if block.name != group:
            assert getattr(config, block.name) == getattr(default, block.name)


def test_what_the_choices_mean() -> None:
    assert compose(["zero=stage2_offload"]).zero.offload == "cpu"
    assert [compose([f"zero=stage{n}"]).zero.stage for n in range(4)] == [0, 1, 2, 3]
    bf16, autocast = compose(["precision=bf16"]).precision, compose(["precision=bf16_autocast"]).precision
    assert (bf16.dtype, bf16.half_weights) == ("bf16", True)
    assert (autocast.dtype, autocast.half_weights) == ("bf16", False)
    parallel = compose(["parallel=tensor2_pipeline2"]).parallel
    assert (parallel.tensor, parallel.pipeline, parallel.model_ranks) == (2, 2, 4)


def test_a_config_survives_the_way_to_plain_data_and_back() -> None:
    words = ["data=tokens", "data.files=[a,b/c]", "model.num_kv_heads=null", "zero=stage3_offload", "optimizer.lr=1e-4", "launch.threads=3"]
    config = compose(words)
    assert build(Config, to_dict(config)) == config
    assert to_dict(config)["data"]["files"] == ["a", "b/c"]
    assert config.data.files == ("a", "b/c")


def test_without_words_the_groups_agree_with_the_schemas_types() -> None:
    config = compose([])
    for key, kind, _ in leaves():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        assert type_name(kind)
        assert isinstance(value, (bool, int, float, str, tuple, type(None))), key
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optimizer.lr=1e-4", "lr", 1e-4),
        ("optimizer.lr=1e3", "lr", 1000.0),
        ("optimizer.lr=1", "lr", 1.0),
        ("optimizer.weight_decay=.1", "weight_decay", 0.1),
    ],
)
def test_numbers_have_the_schemas_type(word: str, key: str, value: float) -> None:
    found = getattr(compose([word]).optimizer, key)
    assert found == value
    assert type(found) is float


def test_null_is_a_value_where_the_schema_says_so() -> None:
    assert compose(["data.workers=2"]).data.workers == 2
    assert compose(["data.workers=null"]).data.workers is None
    assert refused(["seed=null"]).subject == "seed"


def test_values_follow_other_values() -> None:
    assert compose(["steps=70"]).schedule.total_steps == 70
    config = compose(["steps=70", "schedule.total_steps=50", "output_root=elsewhere"])
    assert (config.schedule.total_steps, config.data.cache) == (50, "elsewhere/.data")


@pytest.mark.parametrize("sign", ["", "+", "++"])
@pytest.mark.parametrize(("key", "meant"), TYPOS)
def test_unknown_keys_are_refused_however_they_are_written(sign: str, key: str, meant: str) -> None:
    letter = refused([f"{sign}{key}=1"])
    assert (letter.subject, letter.write) == (key, meant)
    assert meant.rpartition(".")[2] in letter.expected


@pytest.mark.parametrize(
    ("word", "subject", "expected"),
    [
        ("zero=stage9", "zero", "stage0, stage1"),
        ("zero=1", "zero", "stage0, stage1"),
        ("recipe=tini", "recipe", "tiny"),
        ("zero.stage=4", "zero.stage", "0, 1, 2, 3"),
        ("zero.stage=true", "zero.stage", "0, 1, 2, 3"),
        ("model.norm=batchnorm", "model.norm", "rmsnorm, layernorm"),
        ("model.bias=perhaps", "model.bias", "true or false"),
        ("data.workers=many", "data.workers", "int or null"),
        ("data.files=a", "data.files", "list of texts"),
        ("data.weights=[a]", "data.weights", "list of floats"),
        ("optimizer.lr=true", "optimizer.lr", "float"),
        ("steps=1.5", "steps", "int"),
        ("two words", "the word 'two words'", "key=value"),
    ],
)
def test_the_letter_names_the_key_and_the_choices(word: str, subject: str, expected: str) -> None:
    letter = refused([word])
    assert letter.subject == subject
    assert expected in letter.expected
    assert letter.exit_code == 2


@pytest.mark.parametrize(
    ("values", "subject"),
    [
        ({"sede": 1}, "sede"),
        ({"zero": {"ofload": "cpu"}}, "zero.ofload"),
        ({"zero": "stage1"}, "zero"),
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": None}, "seed"),
        ({"model": {"bias": 1}}, "model.bias"),
        ({"zero": {"stage": True}}, "zero.stage"),
        ({"data": {"files": "a"}}, "data.files"),
        ({"data": {"files": [1]}}, "data.files"),
        ({"data": {"weights": 1}}, "data.weights"),
        ({"data": {"weights": ["1"]}}, "data.weights"),
        ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr"),
    ],
)
def test_plain_data_is_held_to_the_schema_without_hydra(values: dict[str, Any], subject: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config, values)
    assert caught.value.subject == subject


def test_a_folder_of_ones_own_adds_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    assert compose(["recipe=mine"], extra=tmp_path).seed == 77


def test_every_setting_has_a_meaning_in_words() -> None:
    for key, _, spec in leaves():
        assert spec.metadata["tag"] in ("meaning", "layout", "free"), key
        assert len(spec.metadata["doc"]) >= 10, key

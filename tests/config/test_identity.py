"""The hash of a run's meaning: it moves with every setting tagged `meaning` and with no other."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin

import pytest

from framework.config.compose import build, leaves, to_dict
from framework.config.identity import Change, changes, full_hash, meaning_hash
from framework.config.schema import Config

LEAVES = {key: (kind, spec) for key, kind, spec in leaves()}


def another(kind: Any, value: Any) -> Any:
    """Some other value of the type; the same one where the type has only one."""
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if choice != value), value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, "more" if get_args(kind)[0] is str else 0.5)
    if kind is str:
        return value + "x"
    if value is None or value == "auto":
        return next(other for member, other in ((int, 7), (float, 7.5), (str, "x")) if member in get_args(kind))
    return value + 1


def with_value(key: str, value: Any) -> Config:
    plain = to_dict(Config())
    *blocks, name = key.split(".")
    inner = plain
    for block in blocks:
        inner = inner[block]
    inner[name] = value
    return build(Config, plain)


@pytest.mark.parametrize("key", LEAVES)
def test_one_setting_at_a_time(key: str) -> None:
    kind, spec = LEAVES[key]
    old, new = spec.default, another(kind, spec.default)
    if old == new:
        pytest.skip("a setting with one choice")
    changed = with_value(key, new)
    assert changes(Config(), changed) == [Change(key, spec.metadata["tag"], old, new)]
    assert (meaning_hash(changed) != meaning_hash(Config())) == (spec.metadata["tag"] == "meaning")
    assert full_hash(changed) != full_hash(Config())


def test_equal_configs_are_equal() -> None:
    assert (meaning_hash(Config()), full_hash(Config())) == (meaning_hash(build(Config, {})), full_hash(build(Config, {})))
    assert changes(Config(), build(Config, {})) == []


def test_the_hash_is_sixteen_hex_digits_and_the_same_in_every_process() -> None:
    assert all(len(h) == 16 and set(h) <= set("0123456789abcdef") for h in (meaning_hash(Config()), full_hash(Config())))
    kept = build(Config, to_dict(dataclasses.replace(Config(), seed=5)))
    assert meaning_hash(kept) == meaning_hash(dataclasses.replace(Config(), seed=5))


def test_what_the_contract_calls_meaning_and_layout_and_free() -> None:
    tags = {key: spec.metadata["tag"] for key, (_, spec) in LEAVES.items()}
    assert set(tags.values()) == {"meaning", "layout", "free"}
    for key in ("seed", "optimizer.lr", "model.hidden_size", "data.seq_length", "batch.global_size", "precision.dtype", "schedule.name"):
        assert tags[key] == "meaning"
    for key in ("zero.stage", "parallel.tensor", "batch.micro_size", "engine", "compile", "recompute.granularity"):
        assert tags[key] == "layout"
    for key in ("steps", "launch.threads", "monitor.console", "eval.every", "data.workers", "output_root"):
        assert tags[key] == "free"

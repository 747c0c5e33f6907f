"""A config written as a recipe: choices of groups where they say most of a block, numbers for what they leave. Pure but for
reading conf/.

The recipe composes to the same config (tests/planner/test_written_recipe.py), apart from what is about one start: see APART.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.base.errors import ConfigError
from framework.config.compose import CONF, to_dict
from framework.config.schema import Config

APART = ("name", "output_root", "run", "resume", "resume_changes", "launch", "plan", "convert")
"""What a recipe does not say: where a run lies, how it is started, and settings of other programs."""

SAID = ("model", "data", "precision", "zero", "parallel")
"""Groups that a recipe names even where it has the choice that nobody names."""


@dataclass(frozen=True)
class Header:
    """What the head of a recipe says beside its command."""

    goal: str
    hardware: str
    ranks: int
    hosts: int
    expected: str
    date: str


def recipe_text(config: Config, name: str, header: Header) -> str:
    """The file `name`.yaml."""
    start = f"--num_gpus {header.ranks}" if header.hosts == 1 else "--hostfile HOSTFILE"
    head = {
        "Goal": header.goal,
        "Hardware": header.hardware,
        "Ranks": str(header.ranks),
        "Command": f"deepspeed {start} --module framework.train recipe={name}",
        "Expected": header.expected,
        "Date": header.date,
    }
    choices, numbers = _told(config)
    lines = ["# @package _global_", *(f"# {key:<12}{value}" for key, value in head.items()), "defaults:"]
    lines += [f"  - override /{group}: {choice}" for group, choice in choices.items()]
    body = yaml.safe_dump({"name": name, **numbers}, sort_keys=False, width=140, default_flow_style=None)
    return "\n".join(lines) + "\n\n" + body


def name_of(path: Path) -> str:
    """The recipe's name; raises ConfigError where it could not be named in `recipe=`, or where there is another file."""
    if path.suffix != ".yaml" or not path.stem.replace("_", "a").replace("-", "a").isalnum():
        raise ConfigError("plan.write", str(path), "a file NAME.yaml, of letters, digits, _ and -", "plan.write=recipes/mine.yaml")
    if path.exists():
        raise ConfigError("plan.write", f"{path}, which exists", "the name of a new file")
    return path.stem


def _told(config: Config) -> tuple[dict[str, str], dict[str, Any]]:
    """The choice of each group that leaves the least to say, and what is left."""
    have, usual = to_dict(config), to_dict(Config())
    usual["schedule"]["total_steps"] = config.steps  # as conf/config.yaml derives them
    usual["data"]["cache"] = f"{config.output_root}/.data"
    defaults = _defaults()
    choices: dict[str, str] = {}
    numbers: dict[str, Any] = {}
    for key, value in have.items():
        if key in APART:
            continue
        if not isinstance(value, dict):
            if value != usual[key]:
                numbers[key] = value
            continue
        left = _differences(value, usual[key])
        if key in defaults:
            choice, left = min(_by_choice(key, value, usual[key], defaults[key]), key=lambda found: len(found[1]))
            if choice != defaults[key] or key in SAID:
                choices[key] = choice
        if left:
            numbers[key] = left
    return choices, numbers


def _by_choice(group: str, block: Mapping[str, Any], usual: Mapping[str, Any], default: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(choice, what it leaves to say) of a group, the default first."""
    files = sorted((CONF / group).glob("*.yaml"), key=lambda path: path.stem != default)
    for path in files:
        said = yaml.safe_load(path.read_text()) or {}
        yield path.stem, _differences(block, {**usual, **said})


def _differences(block: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if not _same(value, other.get(key))}


def _same(value: Any, other: Any) -> bool:
    """YAML reads 3e-3 as a text; Hydra as a number."""
    if isinstance(value, float) and isinstance(other, str):
        try:
            return value == float(other)
        except ValueError:
            return False
    return value == other


def _defaults() -> dict[str, str]:
    """The choice of each group where nothing is said, from conf/config.yaml."""
    listed = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    pairs = [item for entry in listed if isinstance(entry, dict) for item in entry.items()]
    return {group: choice for group, choice in pairs if isinstance(choice, str) and (CONF / group).is_dir() and group != "recipe"}

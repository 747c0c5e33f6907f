"""Settings that do not go together: one list of rules (rules_layout.py, rules_run.py), each with its law and its remedy.

All run on the composed config before any process group, model or file exists. Pure; conf/README.md is generated from them.
"""

from __future__ import annotations

import math
from typing import Any

from framework.base.errors import ConfigError
from framework.config.case import Case, Rule
from framework.config.ranges import RANGES
from framework.config.rules_layout import LAYOUT
from framework.config.rules_run import RUN
from framework.config.schema import Config

RULES: tuple[Rule, ...] = (*LAYOUT, *RUN)


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check(config: Config, ranks: int, ranks_per_host: int) -> None:
    """Raise the ConfigError of the first rule that `config` breaks on `ranks` processes, `ranks_per_host` of them on each host."""
    for key, (least, greatest) in RANGES.items():
        value = value_at(config, key)
        if value is None or ((least is None or value >= least) and (value < math.inf if greatest is None else value <= greatest)):
            continue
        raise ConfigError(key, value, f"{least} or more" if greatest is None else f"{least} to {greatest}")
    case = Case(config, ranks, ranks_per_host)
    for rule in RULES:
        offence = rule(case)
        if offence is not None:
            raise ConfigError(f"{offence.key}  [{rule.__name__}]", offence.got, str(rule.__doc__), offence.write)


def accepted(config: Config, ranks: int, ranks_per_host: int) -> bool:
    """Whether check() finds nothing wrong."""
    try:
        check(config, ranks, ranks_per_host)
    except ConfigError:
        return False
    return True

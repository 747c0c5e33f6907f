"""Tiny models with blocks for four pipeline stages, and what a stage holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from framework.config.schema import Config
from framework.engine.engine import PlainEngine
from framework.engine.sharded import DeepSpeedEngine
from tests.engine import tiny
from tests.parallel import spread

# As many blocks as the most stages; three is odd for two.
LLAMA = replace(spread.LLAMA, num_layers=4)
GPT2 = replace(spread.GPT2, num_layers=4)


@dataclass(frozen=True)
class Stages(spread.Spread):
    """Two stages, unless told otherwise."""

    pipeline: int = 2


def plain_of(config: Config) -> PlainEngine:
    """The oracle: the same model on one process."""
    return PlainEngine(tiny.transformer(config.model), config)


def masters(engine: DeepSpeedEngine | PlainEngine) -> spread.Held:
    return spread.held(engine, tiny.masters(engine))


def live(engine: DeepSpeedEngine | PlainEngine) -> spread.Held:
    return spread.held(engine, tiny.live_weights(engine))

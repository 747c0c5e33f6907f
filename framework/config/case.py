"""What a rule is made of: the case that it looks at, and the offence that it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from framework.config.schema import Config


@dataclass(frozen=True)
class Case:
    """What a rule looks at: a config, the number of ranks, and how many of them share a host."""

    config: Config
    ranks: int
    ranks_per_host: int

    @property
    def data_ranks(self) -> int:
        parallel = self.config.parallel
        return parallel.data or max(1, self.ranks // parallel.model_ranks)

    @property
    def samples_at_once(self) -> int:
        """Samples that all data ranks take in one micro-batch."""
        return self.config.batch.micro * self.data_ranks

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads of one attention."""
        return self.config.parallel.tensor * self.config.parallel.context


class Offence(NamedTuple):
    """What breaks a law: the key, what stands there, what to write instead."""

    key: str
    got: str
    write: str


Rule = Callable[[Case], Offence | None]
"""Its name is the rule's id, its docstring is the law; it returns None or what breaks the law."""

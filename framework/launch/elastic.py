"""The same training on fewer ranks: which layout, micro-batch and accumulation. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from framework.base.errors import ConfigError
from framework.config.check import accepted
from framework.config.schema import Config, Parallel


def fit(config: Config, ranks: int, ranks_per_host: int | None = None) -> tuple[Config, int]:
    """The largest layout on at most `ranks` ranks that check() accepts with the same global batch, and how many ranks it has.

    More ranks come before the recipe's own degrees, and those before smaller ones (resharding takes care of the State); the
    micro-batch is the recipe's, or the largest below it that divides. Raises ConfigError where nothing is accepted.
    """
    for count in range(ranks, 0, -1):
        for parallel in _layouts(config.parallel, count):
            data = count // parallel.model_ranks
            for micro in range(config.batch.micro, 0, -1):
                batch = config.batch if config.batch.micro_size == "auto" else replace(config.batch, micro_size=micro)
                candidate = replace(config, parallel=parallel, batch=batch, launch=replace(config.launch, num_procs=count))
                if config.batch.global_size % (micro * data) == 0 and accepted(candidate, count, min(count, ranks_per_host or count)):
                    return candidate, count
    raise ConfigError("launch.elastic", f"{ranks} ranks left", "a layout for which check() finds nothing wrong", "launch.elastic=false")


def _layouts(parallel: Parallel, count: int) -> Iterator[Parallel]:
    """Degrees that divide the recipe's and fit `count` ranks, those of the most ranks for one copy of the model first."""
    degrees = [
        (tensor, pipeline, context)
        for tensor in _divisors(parallel.tensor)
        for pipeline in _divisors(parallel.pipeline)
        for context in _divisors(parallel.context)
        if count % (tensor * pipeline * context) == 0
    ]
    for tensor, pipeline, context in sorted(degrees, key=lambda each: -each[0] * each[1] * each[2]):
        data = None if parallel.data is None else count // (tensor * pipeline * context)
        sequence = parallel.sequence and tensor > 1
        yield replace(parallel, data=data, tensor=tensor, pipeline=pipeline, context=context, sequence=sequence)


def _divisors(degree: int) -> list[int]:
    return [each for each in range(degree, 0, -1) if degree % each == 0]

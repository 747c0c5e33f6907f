"""The layout for the ranks that are left: the most ranks, the recipe's degrees if they fit, the same global batch in any case."""

from __future__ import annotations

import pytest

from framework.base.errors import ConfigError
from framework.config.check import check
from framework.config.compose import compose
from framework.launch.elastic import fit

WORDS = ["batch.global_size=12", "batch.micro_size=4", "zero=stage1"]


@pytest.mark.parametrize(
    ("words", "left", "ranks", "micro", "degrees"),
    [
        ([], 4, 4, 3, (1, 1, 1)),  # 12 = 3 x 4 ranks
        ([], 3, 3, 4, (1, 1, 1)),
        (["batch.global_size=8"], 3, 2, 4, (1, 1, 1)),  # 8 does not divide by 3
        (["batch.global_size=7"], 3, 1, 1, (1, 1, 1)),
        (["parallel=tensor2"], 4, 4, 3, (2, 1, 1)),
        (["parallel=tensor2"], 3, 3, 4, (1, 1, 1)),  # three ranks rather than one pair
        (["parallel=tensor2", "batch.global_size=8"], 3, 2, 4, (2, 1, 1)),  # as many ranks either way: the recipe's degrees
        (["parallel=pipeline2", "batch.global_size=8"], 5, 4, 4, (1, 2, 1)),
    ],
)  # fmt: skip
def test_fit(words: list[str], left: int, ranks: int, micro: int, degrees: tuple[int, int, int]) -> None:
    config = compose([*WORDS, *words])
    found, count = fit(config, left)
    parallel = found.parallel
    assert (count, found.batch.micro_size) == (ranks, micro)
    assert (parallel.tensor, parallel.pipeline, parallel.context) == degrees
    assert found.batch.global_size == config.batch.global_size
    check(found, count, count)


def test_data_degrees_that_were_written_down_follow() -> None:
    found, count = fit(compose([*WORDS, "parallel.data=4", "parallel=data", "batch.micro_size=3"]), 3)
    assert (found.parallel.data, count) == (3, 3)


def test_where_nothing_fits_it_says_so() -> None:
    with pytest.raises(ConfigError, match="0 ranks left"):
        fit(compose(WORDS), 0)

"""Sampling on distributions that are known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from framework.base.errors import ConfigError, RunError
from framework.infer.sample import sample

# Of which the next id is the likeliest after id 0, 1, 2, 3: a cycle 0 -> 2 -> 1 -> 3 -> 0.
NEXT = {0: 2, 2: 1, 1: 3, 3: 0}


def cycle(ids: Tensor) -> Tensor:
    """Logits [1, seq, 4] that depend on the last id only; the runner-up is close behind."""
    logits = torch.zeros(1, ids.shape[1], 4)
    for position, token in enumerate(ids[0].tolist()):
        logits[0, position, NEXT[token]] = 0.01
    return logits


def fixed(probabilities: list[float]):
    """A model that does not listen: the same distribution after everything."""
    logits = torch.tensor(probabilities).log()
    return lambda ids: logits.expand(1, ids.shape[1], -1)


def test_greedy_follows_the_largest_logit() -> None:
    assert sample(cycle, [0], length=6, context=8, temperature=0.0, seed=1) == [2, 1, 3, 0, 2, 1]


def test_the_model_sees_the_last_tokens_only() -> None:
    seen = []

    def watch(ids: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return cycle(ids)

    sample(watch, [3, 0, 2], length=3, context=4, temperature=0.0, seed=1)
    assert seen == [[[3, 0, 2]], [[3, 0, 2, 1]], [[0, 2, 1, 3]]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_distribution(temperature: float) -> None:
    """Chi-square with 3 degrees of freedom: above 16.27 once in a thousand seeds; p ** (1 / T) by hand."""
    weights = [p ** (1 / temperature) for p in (0.1, 0.2, 0.3, 0.4)]
    wanted = [weight / sum(weights) for weight in weights]
    draws = sample(fixed([0.1, 0.2, 0.3, 0.4]), [0], length=4000, context=1, temperature=temperature, seed=7)
    expected = [4000 * p for p in wanted]
    chi_square = sum((draws.count(token) - count) ** 2 / count for token, count in enumerate(expected))
    assert chi_square < 16.27


def test_draws_do_not_hang_on_the_one_before() -> None:
    """A second chi-square, over pairs: 4 cells of a fair coin, 3 degrees of freedom."""
    draws = sample(fixed([0.5, 0.5]), [0], length=4000, context=1, temperature=1.0, seed=3)
    pairs = list(zip(draws[::2], draws[1::2], strict=True))
    chi_square = sum((pairs.count((a, b)) - 500) ** 2 / 500 for a in (0, 1) for b in (0, 1))
    assert chi_square < 16.27


def test_a_seed_gives_one_text_and_another_seed_another() -> None:
    one, same, other = (sample(fixed([0.25] * 4), [0], length=64, context=4, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert one == same
    assert one != other


def test_random_numbers_of_training_stay_where_they_are() -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    sample(fixed([0.5, 0.5]), [0], length=16, context=4, temperature=1.0, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_kept_for_a_backward_pass() -> None:
    weight = torch.zeros(4, requires_grad=True)
    tracked = []

    def model(ids: Tensor) -> Tensor:
        logits = (weight * 2).expand(1, ids.shape[1], 4)
        tracked.append(logits.requires_grad)
        return logits

    sample(model, [0], length=2, context=4, temperature=1.0, seed=5)
    assert tracked == [False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tiny_temperature_is_greedy_in_every_type(dtype: torch.dtype) -> None:
    logits = torch.tensor([-3.0, 900.0, 901.0, -math.inf]).to(dtype)
    greedy = int(torch.tensor(logits.tolist()).argmax())
    # In bf16 900 and 901 are one number (both 900): then the draw is between them.
    allowed = {greedy} if dtype != torch.bfloat16 else {1, 2}
    draws = sample(lambda ids: logits.expand(1, ids.shape[1], 4), [0], length=20, context=4, temperature=1e-6, seed=5)
    assert set(draws) <= allowed


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    draws = sample(fixed([0.5, 0.0, 0.5]), [0], length=500, context=1, temperature=3.0, seed=5)
    assert set(draws) == {0, 2}


def test_no_length_no_tokens() -> None:
    assert sample(cycle, [0], length=0, context=4, temperature=1.0, seed=5) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_is_a_letter(bad: float, temperature: float) -> None:
    logits = torch.tensor([0.0, bad, 1.0])
    with pytest.raises(RunError, match="logits"):
        sample(lambda ids: logits.expand(1, ids.shape[1], 3), [0], length=1, context=4, temperature=temperature, seed=5)


def test_what_cannot_be_sampled_is_a_letter() -> None:
    with pytest.raises(ConfigError, match="prompt"):
        sample(cycle, [], length=1, context=4, temperature=1.0, seed=5)
    with pytest.raises(ConfigError, match="temperature"):
        sample(cycle, [0], length=1, context=4, temperature=-1.0, seed=5)

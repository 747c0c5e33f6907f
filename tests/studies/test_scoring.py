"""framework/studies/scoring.py against plain loops in float64, on models that are known by hand. No harness is needed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from framework.data.tokenizer import ByteTokenizer
from framework.studies.scoring import Scorer, windows

SIZE = 7


class Letters:
    """The letters a to f as 1 to 6; id 0 ends a document, where `end` says so."""

    kind, vocab_size, checksum = "letters", SIZE, ""

    def __init__(self, end: int | None = 0) -> None:
        self.end = end

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([ord(letter) - 96 for letter in text.replace("\n", "f")], np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(96 + each) for each in ids if each)


def logits(ids: Tensor) -> Tensor:
    """[batch, seq] -> [batch, seq, SIZE]: of the last id and of the sum of all that are seen, so that what is seen matters."""
    sums = ids.cumsum(dim=1)[..., None].double()
    return torch.cos(1.7 * sums + ids[..., None] * torch.arange(SIZE) + 0.3 * torch.arange(SIZE) ** 2) * 2


def likelihood(seen: Sequence[int], following: int) -> tuple[float, bool]:
    """By Python's own floats: the log likelihood of one id behind others, and whether it is the likeliest."""
    total = sum(seen)
    values = [2 * math.cos(1.7 * total + seen[-1] * each + 0.3 * each**2) for each in range(SIZE)]
    return values[following] - math.log(sum(map(math.exp, values))), max(values) == values[following]


def plain(first: Sequence[int], second: Sequence[int], length: int) -> tuple[float, bool]:
    """Each id of `second` from what stands before it: in the pieces that the harness describes, of `length` predictions each, the last
    of which sees as much as it can."""
    whole, value, greedy = [*first, *second], 0.0, True
    for at in range(len(second)):
        piece = at // length
        stop = min(len(first) + (piece + 1) * length, len(whole))
        seen = whole[max(0, stop - length - 1) : len(first) + at]
        one, likeliest = likelihood(seen, whole[len(first) + at])
        value, greedy = value + one, greedy and likeliest
    return value, greedy


def test_windows_are_those_of_the_harness() -> None:
    """The example in the documentation of lm_eval.api.model.LM.loglikelihood_rolling: ten tokens, four at once."""
    pieces = list(windows([-1], range(10), 4))
    assert pieces == [([-1, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]
    assert list(windows([1, 2, 3], [4], 2)) == [([2, 3, 4], 1)]
    assert list(windows([1], [], 2)) == []


@pytest.mark.parametrize("length", [1, 3, 5, 64])
@pytest.mark.parametrize("batch", [1, 4])
def test_scores_are_those_of_a_plain_loop(length: int, batch: int) -> None:
    draw = random.Random(5)
    pairs = [([draw.randrange(SIZE) for _ in range(draw.randint(1, 9))], [draw.randrange(SIZE) for _ in range(n)]) for n in range(12)]
    scorer = Scorer(logits, Letters(), length, batch)
    found = scorer.score(pairs)
    for (value, greedy), (first, second) in zip(found, pairs, strict=True):
        wanted = plain(first, second, length)
        assert value == pytest.approx(wanted[0], abs=1e-4)
        assert greedy == wanted[1]
    assert found[0] == (0.0, True)


def test_what_greedy_decoding_writes_is_called_greedy() -> None:
    never_ending = torch.tensor([1e9, *[0.0] * (SIZE - 1)])
    scorer = Scorer(lambda ids: logits(ids) - never_ending, Letters(None), 32, 2)
    text = scorer.generate("ab", [], 6, 0.0, 1)
    first = [1, 2]
    for letter in text:
        best = max(range(1, SIZE), key=lambda each: likelihood(first, each)[0])
        first.append(best)
        assert chr(96 + best) == letter
    other = text[:-1] + ("a" if text[-1] != "a" else "b")
    assert [greedy for _, greedy in scorer.score([scorer.pair("ab", text), scorer.pair("ab", other)])] == [True, False]


def test_texts_without_anything_before_them() -> None:
    scorer = Scorer(logits, Letters(), 4, 2)
    assert scorer.rolling(["abcabc", ""]) == pytest.approx([plain([0], [1, 2, 3, 1, 2, 3], 4)[0], 0.0], abs=1e-4)
    assert scorer.pair("", "ab") == ([0], [1, 2])
    assert Scorer(logits, Letters(None), 4, 2).pair("", "ab") == ([6], [1, 2])


def test_spaces_between_two_texts_belong_to_the_second() -> None:
    scorer = Scorer(logits, ByteTokenizer(), 4, 2)
    assert scorer.pair("one  ", "two") == ([*b"one"], [*b"  two"])
    assert scorer.pair("one", " two") == ([*b"one"], [*b" two"])
    assert scorer.pair("\n ", "two") == ([*b"\n"], [*b"\n two"])


def test_writing_ends_where_it_should() -> None:
    order = [0, 2, 3, 4, 5, 6, 0]  # after a comes b, and so on; after f the end
    table = 9.0 * torch.eye(SIZE)[order]
    scorer = Scorer(lambda ids: table[ids], Letters(), 3, 1)
    assert scorer.generate("a", [], 9, 0.0, 1) == "bcdef"
    assert scorer.generate("a", [], 3, 0.0, 1) == "bcd"
    assert scorer.generate("a", ["e", "cd"], 9, 0.0, 1) == "b"
    assert scorer.generate("", [], 4, 0.0, 1) == ""  # after an end comes an end
    flat = Scorer(lambda ids: torch.zeros(*ids.shape, SIZE), Letters(None), 3, 1)
    drawn = [flat.generate("a", [], 40, 1.0, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == SIZE - 1

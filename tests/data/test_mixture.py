"""framework/data/mixture.py: proportions counted by hand in whole numbers, and the order told from the tokens that are read."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from framework.base.errors import ConfigError
from framework.config.schema import Data
from framework.data.mixture import Mixture, pattern, turns_of
from framework.data.prepare import open_corpora
from framework.data.stream import StreamSettings, TrainingStream
from framework.data.tokens import Corpus, TokenFile, write_tokens

SEQ = 4
SETTINGS = StreamSettings(
    seed=3, shuffle=True, micro_size=2, accumulation=3, data_rank=0, data_size=1, workers=0, prefetch=2, vocab_size=100_000
)
AWKWARD = [
    (0.7, 0.2, 0.1),
    (1, 1, 1),
    (0.333, 0.667),
    (1, 2, 4, 8, 16.5),
    (0.9, 0.05, 0.03, 0.01, 0.01),
    (5,),
    (0.001, 0.999),
    (3, 7, 11, 13),
]


def part_of(folder: Path, name: str, first: int, samples: int) -> Corpus:
    """Sample k begins with token first + k * SEQ."""
    write_tokens(folder / name, [np.arange(first, first + samples * SEQ + 1)], np.dtype("int32"))
    return Corpus([TokenFile(str(folder / name))], SEQ)


def three(folder: Path, weights: Sequence[float] = (0.5, 0.3, 0.2)) -> Mixture:
    """Corpora of 40, 7 and 3 samples, whose tokens begin at 0, 10,000 and 20,000."""
    return Mixture([part_of(folder, f"p{k}", 10_000 * k, samples) for k, samples in enumerate((40, 7, 3))], weights)


def read(mixture: Mixture, count: int, seed: int = 3) -> list[tuple[int, int]]:
    """(corpus, sample of it) of the first `count` samples, told from their first tokens."""
    tokens = mixture.read(mixture.places(np.arange(count), seed, True))[:, 0]
    return [(int(token) // 10_000, int(token) % 10_000 // SEQ) for token in tokens]


@pytest.mark.parametrize("weights", AWKWARD, ids=str)
def test_at_every_prefix_of_a_million_no_share_is_off_by_a_sample(weights: Sequence[float]) -> None:
    """Whole numbers only: |n w / W - taken| < 1 is |n w - taken W| < W."""
    places = pattern(turns_of(weights))
    million = np.tile(places, 1_000_000 // len(places) + 1)[:1_000_000]
    written = [Fraction(str(weight)) for weight in weights]
    whole = sum(written)
    prefix = np.arange(1, len(million) + 1)
    for corpus, weight in enumerate(written):
        share = weight / whole
        taken = np.cumsum(million == corpus)
        assert np.abs(prefix * share.numerator - taken * share.denominator).max() < share.denominator


def test_weights_are_the_decimals_that_are_written() -> None:
    assert turns_of((0.7, 0.2, 0.1)) == [7, 2, 1]
    assert turns_of((70, 20, 10)) == [7, 2, 1]
    assert turns_of((1e-3, 0.999)) == [1, 999]
    assert turns_of((2.0,)) == [1]


def test_the_windows_of_places_are_kept_for_many_mixtures() -> None:
    """Earliest deadline first may not miss one: 500 random mixtures of 2 to 12 corpora, each over its whole pattern."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        turns = rng.integers(1, 60, rng.integers(2, 13)).tolist()
        places = pattern(turns)
        assert np.bincount(places, minlength=len(turns)).tolist() == turns
        prefix = np.arange(1, len(places) + 1)
        for corpus, count in enumerate(turns):
            assert np.abs(np.cumsum(places == corpus) * len(places) - prefix * count).max() < len(places)


def test_each_corpus_goes_through_its_own_epochs(tmp_path: Path) -> None:
    """The share of each, every sample once in each of its epochs, in another order each time; the first as it is read alone."""
    mixture = three(tmp_path)
    seen = read(mixture, 400)
    of = {corpus: [sample for owner, sample in seen if owner == corpus] for corpus in range(3)}
    assert [len(samples) for samples in of.values()] == [200, 120, 80]
    for corpus, size in enumerate((40, 7, 3)):
        epochs = [of[corpus][start : start + size] for start in range(0, len(of[corpus]) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    alone = part_of(tmp_path, "p0", 0, 40)
    tokens = alone.read(alone.places(np.arange(200), 3, True))[:, 0]
    assert of[0] == (tokens // SEQ).tolist()
    assert mixture.taken(400) == [200, 120, 80]
    assert [(share, epochs) for _, share, epochs in mixture.shares(400)] == [(0.5, 5.0), (0.3, 120 / 7), (0.2, 80 / 3)]


def test_corpora_of_one_size_are_not_in_one_order(tmp_path: Path) -> None:
    mixture = Mixture([part_of(tmp_path, f"p{k}", 10_000 * k, 50) for k in range(2)], (1, 1))
    seen = read(mixture, 100)
    assert [sample for owner, sample in seen if owner == 0] != [sample for owner, sample in seen if owner == 1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("micro", "accumulation"), [(1, 8), (4, 2)])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_layout_reads_the_same_samples_in_each_step_and_goes_on(
    tmp_path: Path, ranks: int, micro: int, accumulation: int, workers: int
) -> None:
    """Global batches of 8 x ranks' worth are cut to 32 samples; the stream is started in the middle too."""
    mixture = three(tmp_path)
    expected = read(mixture, 96)
    for consumed in (0, 32):
        steps: list[list[tuple[int, int]]] = [[] for _ in range(2)]
        for rank in range(ranks):
            settings = replace(
                SETTINGS, micro_size=micro, accumulation=accumulation * 4 // ranks, data_rank=rank, data_size=ranks, workers=workers
            )
            stream = TrainingStream(mixture, settings, torch.device("cpu"))
            batches = stream.start(consumed)
            for step in steps:
                for one in next(batches):
                    pairs = zip(one.indices.tolist(), one.ids[:, 0].tolist(), strict=True)
                    step += [(index, token) for index, token in pairs]
            stream.close()
        for number, step in enumerate(steps):
            found = [(token // 10_000, token % 10_000 // SEQ) for _, token in sorted(step)]
            assert found == expected[consumed + 32 * number : consumed + 32 * (number + 1)]


def test_other_weights_are_other_data(tmp_path: Path) -> None:
    original = three(tmp_path)
    assert three(tmp_path, (5, 3, 2)).fingerprint() == original.fingerprint()
    assert three(tmp_path, (0.5, 0.2, 0.3)).fingerprint() != original.fingerprint()
    joined = Corpus(original.files, SEQ)
    assert Mixture([joined], (1,)).fingerprint() != original.fingerprint()
    again = pickle.loads(pickle.dumps(original))
    assert again.fingerprint() == original.fingerprint()
    assert read(again, 100) == read(original, 100)


def settings(folder: Path, *files: str, **words: object) -> Data:
    given = {"val_fraction": 0.0, "seq_length": SEQ, **words}
    return Data(kind="tokens", files=tuple(str(folder / file) for file in files), **given)  # type: ignore[arg-type]


def test_globs_are_one_corpus_each(tmp_path: Path) -> None:
    for name, first in (("web-0", 0), ("web-1", 500), ("books", 10_000)):
        part_of(tmp_path, name, first, 20)
    train = open_corpora(settings(tmp_path, "web-*", "books", weights=(3.0, 1.0), val_fraction=0.2), 100_000, 1).train
    assert isinstance(train, Mixture)
    # 81 tokens, the last 16 held out: 16 samples of each file.
    assert [len(part) for part in train.parts] == [32, 16]
    owners = [owner for owner, _ in read(train, 64)]
    assert owners.count(1) == 16
    plain = open_corpora(settings(tmp_path, "web-*", "books"), 100_000, 1).train
    assert not isinstance(plain, Mixture)
    assert [Path(file.path).name for file in plain.files] == ["web-0", "web-1", "books"]


@pytest.mark.parametrize(
    ("files", "weights", "subject", "said"),
    [
        (["a", "short"], (1.0, 1.0), "data.files", "short"),
        (["a", "b"], (0.333333, 0.666667), "data.weights", "1,000,000 samples"),
        (["a", "none-*"], (1.0, 1.0), "data.files", "nothing matches"),
    ],
)
def test_what_cannot_be_mixed_is_refused(tmp_path: Path, files: list[str], weights: tuple[float, ...], subject: str, said: str) -> None:
    part_of(tmp_path, "a", 0, 9)
    part_of(tmp_path, "b", 0, 9)
    write_tokens(tmp_path / "short", [np.arange(3)], np.dtype("int32"))
    with pytest.raises(ConfigError) as caught:
        open_corpora(settings(tmp_path, *files, weights=weights), 100_000, 1)
    assert caught.value.subject == subject
    assert said in caught.value.letter()

"""What a model says of texts: log likelihoods of continuations, and continuations of its own. Knows logits and a tokenizer, no run.

Any text may be longer than what the model sees at once: it is predicted in pieces, each token once, each piece with as much before it
as there is room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from framework.data.tokenizer import Tokenizer
from framework.infer.sample import sample

NEWLINE = "\n"


class Scorer:
    """`logits_of` maps ids [batch, seq] on the CPU to logits [batch, seq, vocab], and sees `length` tokens at most, `batch` rows at once.

    A text that follows nothing is taken to follow the token that ends documents, or a newline where there is none.
    """

    def __init__(self, logits_of: Callable[[Tensor], Tensor], tokenizer: Tokenizer, length: int, batch: int) -> None:
        self.logits_of, self.tokenizer, self.length, self.batch = logits_of, tokenizer, length, batch
        self.start = self._ids(NEWLINE)[-1] if tokenizer.end is None else tokenizer.end

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of two texts that follow each other. Spaces between them belong to the second, as tokenizers see it, and the second
        is what the ids of both have beyond those of the first."""
        kept = context.rstrip()
        if not kept:
            return [self.start], self._ids(context + continuation)
        first, both = self._ids(kept), self._ids(context + continuation)
        return first, both[len(first) :]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Of each pair of ids, what comes first (one id or more) and what follows: the sum of the log likelihoods of the second, in
        nats, and whether each of its ids is the likeliest."""
        pieces = [(at, *piece) for at, (first, second) in enumerate(pairs) for piece in windows(first, second, self.length)]
        pieces.sort(key=lambda piece: -len(piece[1]))  # rows of a batch are about equally long, and the largest batch comes first
        sums, greedy = [0.0] * len(pairs), [True] * len(pairs)
        for start in range(0, len(pieces), self.batch):
            rows = pieces[start : start + self.batch]
            ids = torch.zeros(len(rows), len(rows[0][1]) - 1, dtype=torch.long)
            for row, (_, piece, _) in enumerate(rows):
                ids[row, : len(piece) - 1] = torch.tensor(piece[:-1])  # what stands behind a row changes nothing in it
            logits = self.logits_of(ids)
            for row, (at, piece, count) in enumerate(rows):
                likelihoods = logits[row, len(piece) - 1 - count : len(piece) - 1].float().log_softmax(dim=-1)
                wanted = torch.tensor(piece[-count:], device=likelihoods.device)
                sums[at] += float(likelihoods.gather(1, wanted[:, None]).double().sum())
                greedy[at] &= bool((likelihoods.argmax(dim=-1) == wanted).all())
        return list(zip(sums, greedy, strict=True))

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """The log likelihood of each text by itself, from its first token on, in nats."""
        return [value for value, _ in self.score([([self.start], self._ids(text)) for text in texts])]

    def generate(self, prompt: str, until: Sequence[str], most: int, temperature: float, seed: int) -> str:
        """What the model writes after `prompt`: `most` tokens, or to the end of the document, or to the first of `until`, without it."""
        before, ids, text = self._ids(prompt) or [self.start], [], ""
        while len(ids) < most:
            drawn = sample(self.logits_of, [*before, *ids], 1, self.length, temperature, seed + len(ids))
            if drawn == [self.tokenizer.end]:
                break
            ids += drawn
            text = self.tokenizer.decode(ids)
            places = [text.index(stop) for stop in until if stop in text]
            if places:
                return text[: min(places)]
        return text

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode([text])[0].tolist()


def windows(first: Sequence[int], second: Sequence[int], length: int) -> Iterator[tuple[list[int], int]]:
    """Pieces of two runs of ids that follow each other, and how many of the last ids in each are to be predicted from those before:
    every id of `second` once, from at most `length` ids, as many as there are."""
    whole = [*first, *second]
    start = len(first)
    while start < len(whole):
        stop = min(start + length, len(whole))
        yield whole[max(0, stop - length - 1) : stop], stop - start
        start = stop

"""Documents in rows, by plain loops: what each row holds of which document, and what the plain model says of each piece alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.config.schema import Model
from framework.data.tokens import Corpus, TokenFile, write_tokens
from framework.model.transformer import Transformer
from tests.engine import tiny


class Piece(NamedTuple):
    """What one row holds of one document: its place in the row, its tokens, and the target of each, None where it has none."""

    place: int
    ids: list[int]
    targets: list[int | None]


@dataclass(frozen=True)
class Packed:
    """Random tokens in documents of the given lengths, read in rows of `row` tokens."""

    lengths: Sequence[int]
    row: int
    vocabulary: int

    @property
    def documents(self) -> list[list[int]]:
        generator = np.random.default_rng(7)
        return [generator.integers(0, self.vocabulary, length).tolist() for length in self.lengths]

    def corpus(self, folder: Path) -> Corpus:
        """Written and opened again, with documents apart."""
        write_tokens(folder / "packed", (np.array(document, np.int64) for document in self.documents), np.dtype("uint16"))
        return opened(folder, self.row)

    def rows(self) -> list[list[Piece]]:
        """Token by token."""
        stream = [(number, token) for number, document in enumerate(self.documents) for token in document]
        rows: list[list[Piece]] = []
        for first in range(0, len(stream) - self.row, self.row):
            rows.append([])
            for place in range(self.row):
                (document, token), (next_document, next_token) = stream[first + place], stream[first + place + 1]
                if place == 0 or document != stream[first + place - 1][0]:
                    rows[-1].append(Piece(place, [], []))
                rows[-1][-1].ids.append(token)
                rows[-1][-1].targets.append(next_token if document == next_document else None)
        return rows


def opened(folder: Path, row: int) -> Corpus:
    return Corpus([TokenFile(str(folder / "packed"))], row, apart=True)


@dataclass
class Alone:
    """All pieces, one at a time: mean cross entropy over `tokens`, the gradient of that by parameter, and the logits of each row."""

    loss: float
    tokens: int
    gradient: dict[str, Tensor]
    logits: list[Tensor]


def one_at_a_time(packed: Packed, model: Model) -> Alone:
    """In float64 through the plain model, which knows of no documents: each piece is a batch of its own, and begins at position 0."""
    net: Transformer = tiny.transformer(model).double().eval()
    losses, logits = [], []
    for row in packed.rows():
        logits.append([])
        for piece in row:
            said = net(torch.tensor([piece.ids]))[0]
            logits[-1].append(said.detach())
            pairs = [pair for pair in zip(said, piece.targets, strict=True) if pair[1] is not None]
            losses += [F.cross_entropy(one, torch.tensor(target)) for one, target in pairs]
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}
    return Alone(float(loss.detach()), len(losses), gradient, [torch.cat(pieces) for pieces in logits])

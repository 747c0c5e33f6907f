"""The decoder: embedding, blocks, final norm, head. A plain model on one device that knows nothing of how it is trained.

The pieces stand beside each other (`embed_tokens`, `layers`, `final_norm`, `lm_head`), so that a pipeline can run some of
them; the names are the ones in config/parameters.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from framework.config import schema
from framework.model import rope
from framework.model.attention import Attention
from framework.model.fork import Fork
from framework.model.loss import TokenLoss
from framework.model.mlp import make_mlp
from framework.model.norm import make_norm
from framework.model.places import Places, document_mask


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    def __init__(self, model: schema.Model) -> None:
        super().__init__()
        self.attn_norm = make_norm(model)
        self.attention = Attention(model)
        self.mlp_norm = make_norm(model)
        self.mlp = make_mlp(model)
        self.dropout: nn.Module = nn.Dropout(model.dropout)

    def forward(self, hidden: Tensor, places: Places) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        hidden = hidden + self.dropout(self.attention(self.attn_norm(hidden), places))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class Positions(nn.Module):
    """Where the tokens stand that this model is given: a place that a part of the sequence takes."""

    def forward(self, length: int, device: torch.device, starts: Tensor | None = None) -> Tensor:
        """[length], counted from 0; with `starts`, as of MicroBatch, [batch, length], counted in each document from its first token."""
        places = torch.arange(length, device=device)
        return places if starts is None else places - starts


class Transformer(nn.Module):
    """A causal language model after `model`. Its weights are torch's defaults until init.initialise fills them."""

    def __init__(self, model: schema.Model) -> None:
        super().__init__()
        self.settings = model
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.embed_positions = nn.Embedding(model.max_positions, model.hidden_size) if model.position == "learned" else None
        self.positions = Positions()
        self.dropout: nn.Module = nn.Dropout(model.dropout)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.final_norm = make_norm(model)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.fork = Fork(self.lm_head)
        self.loss = TokenLoss()
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's weight, if the settings say so. Call it again after `to_empty`, which parts them.

        Both modules own the one parameter: ZeRO-3 gathers what a module owns when that module runs.
        """
        if self.settings.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, starts: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits, or with `targets` the loss.

        `ids` [batch, seq] -> logits [batch, seq, vocab]; with `targets` [batch, seq] -> the sum of the tokens' cross
        entropies (loss.token_loss_sum), an fp32 scalar. With `starts` the documents in a row know nothing of each other: [batch, seq],
        for each token the place at which its document begins. `positions`, [seq] or [batch, seq], are those of `self.positions` when
        left out.
        """
        counted: Tensor = self.positions(ids.shape[1], ids.device, starts) if positions is None else positions
        hidden = self.embed(ids, counted)
        places = self.places(counted, starts, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, places)
        return self.read_out(hidden, targets)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[batch, seq] -> the residual stream [batch, seq, hidden] that enters the first block."""
        hidden = self.embed_tokens(ids)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        return self.dropout(hidden)

    def read_out(self, hidden: Tensor, targets: Tensor | None) -> Tensor:
        """The residual stream [batch, seq, hidden] that leaves the last block -> logits, or the loss; see `forward`."""
        logits = self.head(hidden)
        return self.loss.whole(logits) if targets is None else self.loss(logits, targets)

    def head(self, hidden: Tensor) -> Tensor:
        """The residual stream that leaves the last block -> the logits that this rank has."""
        (logits,) = self.fork(self.final_norm(hidden))
        return logits

    def places(self, positions: Tensor, starts: Tensor | None, dtype: torch.dtype) -> Places:
        """What every block needs to know beside the residual stream, whose type is `dtype`."""
        rotation = self.rotation(positions)
        if starts is None:
            return Places(rotation, None)
        device = positions.device.type
        autocast = torch.is_autocast_enabled(device)  # then queries are of its type, whatever the stream's
        return Places(rotation, document_mask(starts, torch.get_autocast_dtype(device) if autocast else dtype))

    def rotation(self, positions: Tensor) -> rope.Rotation | None:
        """How far each position turns; None where they are learned."""
        if self.settings.position == "learned":
            return None
        turns = rope.frequencies(self.settings.head_width, self.settings.rope_theta, positions.device)
        return rope.rotation(positions, rope.scaled(turns, self.settings))


def compile_blocks(module: Transformer) -> None:
    """Compile each block in place; equal blocks share one compilation, and names and parameters stay."""
    for layer in module.layers:
        layer.compile()

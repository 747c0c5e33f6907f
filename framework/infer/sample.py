"""Plain sampling: the whole context is run again for every new token. No caches; that is what makes it easy to trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from framework.base.errors import ConfigError, RunError


@torch.no_grad()
def sample(
    logits_of: Callable[[Tensor], Tensor], prompt: Sequence[int], length: int, context: int, temperature: float, seed: int
) -> list[int]:
    """The `length` token ids that the model puts after `prompt`; the prompt itself is not in the answer.

    `logits_of` maps ids [1, seq] on the CPU to logits [1, seq, vocab]; it sees at most the last `context` tokens. With `temperature` 0 the
    likeliest token is taken, otherwise one is drawn from softmax(logits / temperature) (Ackley, Hinton & Sejnowski 1985, eq. 5).
    All ranks call it in lockstep; each draws from a generator of its own on the CPU, seeded alike, so all get the same ids, and
    the random numbers of training stay where they are.
    Raises ConfigError for an empty prompt or a negative temperature, RunError when the model answers with NaN.
    """
    if not prompt:
        raise ConfigError("prompt", got="no tokens", expected="at least one token to go on from")
    if temperature < 0:
        raise ConfigError("temperature", got=temperature, expected="0 (the likeliest token) or more")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    ids = list(prompt)
    for _ in range(length):
        window = torch.tensor([ids[-context:]], dtype=torch.long)
        # float64: the probabilities of a large vocabulary still add up to 1.
        last = logits_of(window)[0, -1].to(device="cpu", dtype=torch.float64)
        ids.append(_draw(last, temperature, generator))
    return ids[len(prompt) :]


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """One id from logits [vocab]; -inf is a token that is never drawn."""
    if logits.isnan().any() or not logits.max().isfinite():
        raise RunError("the model's logits", got="NaN or infinity", expected="finite numbers: the training has diverged")
    if temperature == 0:
        return int(logits.argmax())
    # The largest logit goes to 0 before the division: a tiny temperature would turn it into infinity.
    probabilities = ((logits - logits.max()) / temperature).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))

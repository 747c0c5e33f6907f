"""The figures of the papers, for comparison: what the Ledger's books would be in the systems that the papers describe.

Ours differ where DeepSpeed and our model do: gradients are summed in fp32 in a book of their own, attention keeps no scores.
"""

from __future__ import annotations

from typing import Literal

from framework.config.schema import Model

HALF, MASK = 2, 1
"""Bytes of an fp16 number, and of an element of a dropout mask, as Korthikanti et al. 2022 count them."""

Kept = Literal["all", "selective", "full"]


def zero_states(parameters: float, ranks: int, stage: int) -> dict[str, float]:
    """Bytes per rank of `parameters` in fp16 with Adam under ZeRO `stage` on `ranks` (Rajbhandari et al. 2020, section 3.1, figure 1)."""
    weights, gradients, optimizer = (parameters / (ranks if stage >= since else 1) for since in (3, 2, 1))
    return {"parameters": 2 * weights, "gradients": 2 * gradients, "masters": 4 * optimizer, "moments": 8 * optimizer}


def block_activations(
    model: Model, sequence: int, micro: int, tensor: int = 1, sequence_parallel: bool = False, keep: Kept = "all"
) -> float:
    """Bytes that one block of a GPT in fp16 keeps of a micro-batch on each of `tensor` ranks.

    Korthikanti et al. 2022: section 4.1 for the parts, equations 1 (tensor 1), 2 (tensor), 4 (with sequence parallel), table 2 for what
    recomputation leaves: `selective` computes the attention's core again, `full` the whole block. Units there: s b h and a s^2 b.
    """
    numbers, scores = sequence * micro * model.hidden_size, model.num_heads * sequence**2 * micro
    between = tensor if sequence_parallel else 1
    if keep == "full":
        return HALF * numbers / between
    projections = 4 * HALF * numbers / tensor  # q, k, v and what the output projection reads
    core = (2 * HALF + MASK) * scores / tensor if keep == "all" else 0.0  # softmax, its mask, what is left
    attention = HALF * numbers / between + projections + core + MASK * numbers / between
    feed_forward = HALF * numbers / between + 2 * HALF * 4 * numbers / tensor + MASK * numbers / between
    norms = 2 * HALF * numbers / between
    return attention + feed_forward + norms

"""framework.train with one fault planted: a start that goes on does not put the random numbers back."""

from __future__ import annotations

import sys

from framework import train
from framework.checkpoint import state


def forget(kept: object, accelerator: object, streams: object) -> list[str]:
    """Restores nothing and reports that nothing is missing, as a silent fault would."""
    return []


if __name__ == "__main__":
    state.restore_rng = forget  # before the trainer imports it by name
    sys.exit(train.main())

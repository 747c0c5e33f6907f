"""zero.offload=nvme: what must be there before the ranks meet: a folder that can be written, and libaio for DeepSpeed's async_io."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from framework.base.errors import ConfigError, StartError
from framework.config.schema import Config


def refuse_unready(config: Config) -> None:
    """Raises ConfigError for the folder, StartError where async_io cannot be compiled."""
    zero = config.zero
    if zero.offload != "nvme" or zero.nvme_path is None:
        return
    folder = Path(zero.nvme_path)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError("zero.nvme_path", zero.nvme_path, "a folder on a local disk that can be written", "zero.nvme_path=FOLDER")
    from deepspeed.ops import op_builder  # takes seconds, and nobody else needs it

    builder: Any = op_builder.AsyncIOBuilder  # type: ignore[attr-defined]  (it puts the device's builders there at its import)
    if not builder().is_compatible():
        raise StartError("zero.offload=nvme", "no libaio", "its library and headers", "apt-get install libaio-dev, or zero=stage3_offload")

"""A run's model for others: whole tensors by our names, or a folder for transformers' from_pretrained; and a look at such a folder."""

from __future__ import annotations

import json
from pathlib import Path

from framework.base.errors import ConfigError
from framework.checkpoint.export import export_weights
from framework.checkpoint.state import NAMES
from framework.checkpoint.store import Checkpoint
from framework.config import hf as page
from framework.config import parameters
from framework.config.compose import build
from framework.config.schema import Config, Convert, Model
from framework.model import hf
from framework.model.pretrained import Pretrained
from framework.trainer.folder import CARRIED


def convert_checkpoint(checkpoint: Checkpoint, run: Path, settings: Convert) -> str:
    """Make the new folder settings.out, and say what is in it. `run` is the run's folder or the checkpoint's.

    Raises ConfigError for a model that no family of transformers is, and what export_weights raises.
    """
    assert settings.out is not None, "the entry file has looked at it"
    out, dtype = Path(settings.out), NAMES[settings.dtype]
    if settings.to == "weights":
        nbytes, what = export_weights(checkpoint, out, dtype), "the weights"
    else:
        model = build(Config, checkpoint.manifest.small["config"]).model
        beside = _carried(run)
        before = json.loads(beside.get(page.CONFIG, b"{}"))
        family = page.family_of(model, before.get("model_type"))
        content = json.dumps(page.write(model, family, settings.dtype, before), indent=2) + "\n"
        beside[page.CONFIG] = content.encode()
        nbytes, what = export_weights(checkpoint, out, dtype, hf.entries(model, family), beside), f"{page.CLASSES[family]}, the weights"
    return f"{settings.out}: {what} of step {checkpoint.step}, {nbytes} bytes in {settings.dtype}"


def _carried(run: Path) -> dict[str, bytes]:
    """The small files of the folder that training began from, by name."""
    for place in (run, run.absolute().parents[1]):
        if (place / CARRIED).is_dir():
            return {path.name: path.read_bytes() for path in sorted((place / CARRIED).iterdir())}
    return {}


def look_at(model: Model) -> str:
    """What the folder model.init_from holds. Raises ConfigError and DataError where it cannot be trained."""
    if not model.init_from:
        raise ConfigError("model.init_from", "nothing", "a Hugging Face folder", "model=hf model.init_from=DIR")
    family = page.read(model.init_from).family
    Pretrained(model)
    trains = f"python -m framework.train model=hf model.init_from={model.init_from}"
    return f"{model.init_from}: {page.CLASSES[family]}, {parameters.count(model):,} parameters; {trains}"

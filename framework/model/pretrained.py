"""The weights of a Hugging Face folder, read into a model by the part: no process reads more of a tensor than it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from framework.base.errors import DataError
from framework.checkpoint.export import INDEX, Entry
from framework.checkpoint.shards import Logical
from framework.config import hf as page
from framework.config import parameters
from framework.config.schema import Model
from framework.model import hf
from framework.model.init import tag

SINGLE = "model.safetensors"
TYPES = ("F32", "BF16", "F16")
SAVE = "save_pretrained(FOLDER) of the model in transformers"


class Pretrained:
    """An open folder. `fill` gives modules their parts of its tensors."""

    def __init__(self, model: Model) -> None:
        """Looks at names, shapes and types of everything. Raises DataError where they are not those of `model`, and ConfigError
        for a config.json that is none of ours."""
        assert model.init_from, "a model that begins with random weights"
        self.folder = Path(model.init_from)
        self._files: dict[str, Any] = {}
        self._places = self._found()
        family = page.read(model.init_from).family
        prefix, shapes = hf.prefix(family), {entry.name: entry.shape for entry in parameters.table(model)}
        lacking = not any(name.startswith(prefix) for name in self._places)
        self._parts: dict[str, tuple[Entry, str, int]] = {}
        """Of our names: the entry, the name in the files, and the first row of this part among those that are joined."""
        for entry in hf.entries(model, family):
            name = entry.name.removeprefix(prefix) if lacking else entry.name
            self._judge(name, entry, shapes)
            rows = 0
            for part in entry.parts:
                self._parts[part] = entry, name, rows
                rows += shapes[part][0]
        used = {name for _, name, _ in self._parts.values()}
        head = {"lm_head.weight"} if model.tie_embeddings else set()  # some files keep the tied one twice
        for name in sorted(set(self._places) - used - head):
            if not name.endswith(hf.BUFFERS):
                raise DataError(f"{self.folder}: {name}", "a tensor that the model has no place for", "those that config.json describes")

    def fill(self, module: nn.Module, parts: Mapping[str, Logical]) -> None:
        """Give each parameter of `module` the values of its part, on its device and in its type, and its `.logical`. Padding is 0."""
        tag(module, parts)
        with torch.no_grad():
            for parameter in module.parameters():
                logical: Logical = parameter.logical  # type: ignore[attr-defined]
                box = self._box(logical)
                parameter[: len(box)] = box.to(device=parameter.device, dtype=parameter.dtype)
                parameter[len(box) :] = 0.0

    def _box(self, logical: Logical) -> Tensor:
        """The elements of a part, without padding: only they are read."""
        entry, name, first = self._parts[logical.name]
        stops = [min(start + size, whole) for start, size, whole in zip(logical.offset, logical.size, logical.shape, strict=True)]
        ranges = [slice(start, max(start, stop)) for start, stop in zip(logical.offset, stops, strict=True)]
        ranges[0] = slice(ranges[0].start + first, ranges[0].stop + first)
        kept = self._open(name).get_slice(name)
        try:
            return kept[tuple(reversed(ranges))].t() if entry.turned else kept[tuple(ranges)]
        except SafetensorError as error:
            raise DataError(f"{self.folder}: {name}", str(error), "a file that is whole", SAVE) from None

    def _found(self) -> dict[str, str]:
        """Name of every tensor: its file."""
        index = self.folder / INDEX
        try:
            if index.exists():
                return dict(json.loads(index.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(str(index), f"{type(error).__name__}: {error}", "the index of a model's files", SAVE) from None
        if not (self.folder / SINGLE).exists():
            raise DataError(str(self.folder), f"neither {SINGLE} nor {INDEX}", "a folder with weights in safetensors files", SAVE)
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def _open(self, name: str) -> Any:
        return self._handle(self._places[name])

    def _handle(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise DataError(str(self.folder / file), str(error), "a safetensors file that is whole", SAVE) from None
        return self._files[file]

    def _judge(self, name: str, entry: Entry, shapes: Mapping[str, tuple[int, ...]]) -> None:
        subject = f"{self.folder}: {name}"
        if name not in self._places:
            raise DataError(subject, "nothing", "the tensor: config.json describes another model than the files hold")
        try:
            kept = self._open(name).get_slice(name)
        except SafetensorError as error:
            raise DataError(subject, str(error), "the tensor in the file that the index names", SAVE) from None
        each = [shapes[part] for part in entry.parts]
        joined = (sum(shape[0] for shape in each), *each[0][1:])
        wanted = list(joined[::-1] if entry.turned else joined)
        if kept.get_shape() != wanted:
            raise DataError(subject, f"shape {kept.get_shape()}", f"shape {wanted}, which follows from config.json")
        if kept.get_dtype() not in TYPES:
            raise DataError(subject, kept.get_dtype(), f"one of {', '.join(TYPES)}", SAVE)

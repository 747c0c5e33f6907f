"""Models of transformers in and out: the same logits, the same bits again, each rank its part alone. Skipped without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework.base.errors import DataError
from framework.checkpoint.buffers import live
from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import Job, commit, write_part
from framework.checkpoint.shards import Logical
from framework.checkpoint.state import State
from framework.config import hf as page
from framework.config.compose import to_dict
from framework.config.schema import Config, Model
from framework.convert import convert, look
from framework.engine import state as engine_state
from framework.engine.engine import PlainEngine
from framework.model.pretrained import Pretrained
from framework.model.transformer import Transformer
from framework.parallel.plan import plan
from tests.starts import assert_one_letter, start

transformers = pytest.importorskip("transformers", minversion="5")
from tests.model.families import FAMILIES, make, tensors  # noqa: E402


def model_of(folder: Path) -> Model:
    return replace(page.read(str(folder)).model, init_from=str(folder))


def imported(folder: Path) -> Transformer:
    """On one process, in eval mode."""
    model = model_of(folder)
    net = Transformer(model).eval()
    Pretrained(model).fill(net, {name: Logical.whole(name, tensor.shape) for name, tensor in net.named_parameters()})
    return net


def exported(net: Transformer, root: Path, dtype: str = "fp32", carried: Mapping[str, str] | None = None) -> Path:
    """What framework.convert makes of a checkpoint of `net`."""
    config = Config(model=net.settings)
    shards = list(engine_state.collect(PlainEngine(net, config)))
    job = Job(str(root / "run" / "checkpoints"), 1, "a", 0, 1, arrange([shard for shard, _ in shards], 0), {"config": to_dict(config)})
    write_part(job, live(State(shards)))
    commit(job)
    for name, content in (carried or {}).items():
        (root / "run" / "hf").mkdir(exist_ok=True)
        (root / "run" / "hf" / name).write_text(content)
    words = [f"run={root}/run", "convert.to=hf", f"convert.out={root}/out", f"convert.dtype={dtype}"]
    started = start(words, task=convert)
    assert started.code == 0, started.text
    return root / "out"


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_and_the_bits_come_out_again(name: str, tmp_path: Path) -> None:
    twin, net = make(name, tmp_path / "in"), imported(tmp_path / "in")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for length in (1, 9, 64, 512):
            ids = torch.randint(61, (2, length), generator=generator)
            assert float((net(ids) - twin(ids).logits).abs().max()) < 1e-4
        out = exported(net, tmp_path)
        assert same(tensors(out), tensors(tmp_path / "in"))
        again = type(twin).from_pretrained(out, attn_implementation="eager").eval()
        assert torch.equal(again(ids).logits, twin(ids).logits)


def test_half_weights_in_many_files_come_out_bit_for_bit_with_what_lies_beside_them(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "in", "20KB", torch.bfloat16)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    carried = {"config.json": (tmp_path / "in" / "config.json").read_text(), "tokenizer.json": "{}", "generation_config.json": '{"a": 1}'}
    out = exported(imported(tmp_path / "in"), tmp_path, "bf16", carried)
    assert same(tensors(out), tensors(tmp_path / "in"))
    assert sorted(path.name for path in out.iterdir()) == sorted(["model.safetensors", *carried])
    written = json.loads((out / "config.json").read_text())
    assert (written["dtype"], written["eos_token_id"], written["bos_token_id"]) == ("bfloat16", [2, 3], 1)


def test_gpt2_without_its_head_and_with_old_buffers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    twin = make("gpt2", tmp_path)
    kept = {name.removeprefix("transformer."): tensor for name, tensor in tensors(tmp_path).items()}
    save_file({**kept, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert float((imported(tmp_path)(ids) - twin(ids).logits).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["gpt2-untied", "qwen3-untied-biased"])
def test_a_tensor_rank_reads_its_part_and_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """61 rows of the vocabulary leave padding on the second of two ranks."""
    make(name, tmp_path)
    model, read = model_of(tmp_path), [0]
    whole = dict(imported(tmp_path).named_parameters())

    class Watched:
        """A slice of a file that counts what is taken."""

        def __init__(self, kept: Any) -> None:
            self.kept = kept

        def get_slice(self, name: str) -> Watched:
            return Watched(self.kept.get_slice(name))

        def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor:
            taken = self.kept[ranges]
            read[0] += taken.numel()
            return taken

    for rank in range(2):
        parts = plan(model, 2, rank)
        pretrained = Pretrained(model)
        opened = pretrained._open
        monkeypatch.setattr(pretrained, "_open", lambda name, opened=opened: Watched(opened(name)))
        read[0] = 0
        for key, logical in parts.items():
            holder = torch.nn.Module()
            holder.part = torch.nn.Parameter(torch.full(logical.size, torch.nan))
            pretrained.fill(holder, {"part": logical})
            ends = [min(offset + size, full) for offset, size, full in zip(logical.offset, logical.size, logical.shape, strict=True)]
            wanted = whole[key][tuple(map(slice, logical.offset, ends))]
            assert torch.equal(holder.part[: len(wanted)], wanted)
            assert bool((holder.part[len(wanted) :] == 0).all())
            read[0] -= wanted.numel()
        assert read[0] == 0


def damage(folder: Path, kind: str) -> str:
    """Spoil the folder's weights; what the letter must name."""
    from safetensors.torch import save_file

    kept = tensors(folder)
    file = folder / "model.safetensors"
    if kind == "gone":
        file.unlink()
        return "neither model.safetensors nor"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        return "model.safetensors"
    if kind == "index":
        (folder / "model.safetensors.index.json").write_text("{")
        return "index.json"
    changed = {
        "missing": {name: tensor for name, tensor in kept.items() if "k_norm" not in name},
        "more": {**kept, "model.layers.0.self_attn.sinks": torch.ones(8)},
        "shape": {**kept, "model.norm.weight": torch.ones(47)},
        "type": {**kept, "model.norm.weight": torch.ones(48, dtype=torch.int8)},
    }[kind]
    save_file(changed, file, {"format": "pt"})
    return {"missing": "k_norm.weight", "more": "self_attn.sinks", "shape": "[47]", "type": "I8"}[kind]


@pytest.mark.parametrize("kind", ["gone", "cut", "index", "missing", "more", "shape", "type"])
def test_weights_that_are_not_those_of_the_page_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    make("qwen3", tmp_path)
    good = start(["model=hf", f"model.init_from={tmp_path}"], task=look)
    assert (good.code, "Qwen3ForCausalLM, " in good.text) == (0, True), good.text
    named = damage(tmp_path, kind)
    with pytest.raises(DataError):
        Pretrained(model_of(tmp_path))
    bad = start(["model=hf", f"model.init_from={tmp_path}"], task=look)
    assert bad.code == 2
    assert_one_letter(bad.text, named)

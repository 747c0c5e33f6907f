"""The exported weights are the model's, bit for bit, and other libraries read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from framework.checkpoint.buffers import live
from framework.checkpoint.errors import CheckpointError, SaveError
from framework.checkpoint.export import INDEX, export_weights
from framework.checkpoint.manifest import arrange
from framework.checkpoint.save import Job, commit, write_part
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import DTYPES, State
from framework.checkpoint.store import Checkpoint, Store
from framework.convert import convert
from framework.engine import state as engine_state
from framework.model.transformer import Transformer
from tests.engine import tiny
from tests.starts import assert_one_letter, start

Save = Callable[..., Path]


def newest(root: Path) -> Checkpoint:
    found = Store(str(root)).newest()
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_every_tensor_is_whole(layout: tuple[int, int], dtype: str, save: Save, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save(3, *layout)
    kind = DTYPES[dtype]
    assert export_weights(newest(tmp_path), tmp_path / "out" / "w", dtype) == sum(kind.itemsize * t.numel() for t in tensors.values())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["w"]
    kept = safetensors.torch.load_file(tmp_path / "out" / "w" / "model.safetensors")
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[name], tensors[name].to(kind)) for name in tensors)
    assert all(kept[name].dtype == kind for name in kept)


def test_a_large_model_comes_in_several_files(save: Save, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save(3, 2, 2)
    largest = max(4 * tensor.numel() for tensor in tensors.values())
    export_weights(newest(tmp_path), tmp_path / "w", "F32", file_bytes=largest + 21)
    index = json.loads((tmp_path / "w" / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(4 * tensor.numel() for tensor in tensors.values())}
    files = sorted(path.name for path in (tmp_path / "w").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert index["weight_map"].keys() == tensors.keys()
    for file in files:
        kept = safetensors.torch.load_file(tmp_path / "w" / file)
        assert kept.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert all(torch.equal(kept[name], tensors[name]) for name in kept)


def save_one(root: Path, *shards: tuple[Shard, Tensor]) -> None:
    job = Job(str(root), 1, "a", 0, 1, arrange([shard for shard, _ in shards], 0))
    write_part(job, live(State(list(shards))))
    commit(job)


def test_a_weight_that_fp16_cannot_hold_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    good, large = Logical.whole("good", (3,)), Logical.whole("large", (2,))
    shards = (Shard("master", good, 0, 3, "F32"), torch.ones(3)), (Shard("weight", large, 0, 2, "F32"), torch.tensor([1.0, 7e4]))
    save_one(tmp_path / "in", *shards)
    with pytest.raises(CheckpointError, match="large; got a weight above 65504"):
        export_weights(newest(tmp_path / "in"), tmp_path / "w", "F16")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    export_weights(newest(tmp_path / "in"), tmp_path / "w", "BF16")
    assert set(safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")) == {"good", "large"}


def test_a_folder_in_use_is_left_alone(save: Save, tmp_path: Path) -> None:
    save(3)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "mine").write_text("mine")
    with pytest.raises(SaveError):
        export_weights(newest(tmp_path), tmp_path / "w", "F32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "w"]
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["mine"]


@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.GPT2], ids=["llama_tied", "gpt2"])
def test_a_fresh_model_with_the_exported_weights_is_the_trained_one(model: object, tmp_path: Path) -> None:
    layout = tiny.Layout(1, 2, 2)
    engine = tiny.plain(layout.config(tiny.Form("fp32", 0), model=model))  # type: ignore[arg-type]
    batch = tiny.samples(0, 4, 8, 31)
    engine.step(layout.share(batch, 0), tiny.tokens_of(batch))
    save_one(tmp_path / "run" / "checkpoints", *engine_state.collect(engine))
    started = start([f"run={tmp_path}/run", f"convert.out={tmp_path}/w"], task=convert)
    assert (started.code, "the weights of step 1" in started.text) == (0, True), started.text
    fresh = Transformer(model).eval()  # type: ignore[arg-type]
    safetensors.torch.load_model(fresh, str(tmp_path / "w" / "model.safetensors"))  # strict, but for tied names
    ids = torch.arange(8)[None]
    assert torch.equal(fresh(ids), engine.logits(ids))
    trained = dict(engine.model.named_parameters())
    assert all(torch.equal(tensor, trained[name]) for name, tensor in fresh.named_parameters())
    kept = safetensors.torch.load_file(tmp_path / "w" / "model.safetensors")
    missing, unexpected = fresh.load_state_dict(kept, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if model is tiny.LLAMA else [], [])


def test_what_convert_refuses_is_a_letter(save: Save, tmp_path: Path) -> None:
    save(3)
    (tmp_path / "there").mkdir()
    good = [f"run={tmp_path}", f"convert.out={tmp_path}/w"]
    for words, part in (
        (good[1:], "run"),
        (good[:1], "convert.out"),
        ([good[0], f"convert.out={tmp_path}/there"], "which exists"),
        ([f"run={tmp_path}/none", good[1]], "a run folder"),
        ([f"run={tmp_path}/step_00000009", good[1]], "nothing there"),
    ):
        started = start(words, task=convert)
        assert started.code == 2
        assert_one_letter(started.text, part)
    file = tmp_path / "step_00000003" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    started = start(good, task=convert)
    assert started.code == 2
    assert_one_letter(started.text, "xxh3_128")
    assert not (tmp_path / "w").exists()

"""The shared memory holds the files' data byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from framework.checkpoint import buffers
from framework.checkpoint.buffers import Buffers, free_memory, live
from framework.checkpoint.errors import SaveError
from framework.checkpoint.manifest import arrange
from framework.checkpoint.shards import Logical, Shard
from framework.checkpoint.state import DTYPES, State


@pytest.fixture
def memory() -> Iterator[int]:
    handle = os.memfd_create("test")
    yield handle
    os.close(handle)


def state_of(*tensors: tuple[str, str, torch.Tensor]) -> State:
    return State([(Shard(kind, Logical.whole(name, (len(t),)), 0, len(t), DTYPE_NAMES[t.dtype]), t) for name, kind, t in tensors])


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def test_the_memory_is_what_the_files_will_be(memory: int) -> None:
    state = state_of(
        ("a", "master", torch.randn(5).bfloat16()), ("b", "weight", torch.randn(3)), ("c", "master", torch.randn(1001)),
        ("d", "step", torch.arange(3)),
    )  # fmt: skip
    files = arrange([shard for shard, _ in state.shards], 0)
    held = Buffers(memory)
    for _ in range(2):  # the second time in the same place, with other numbers
        held.copy(state, files)
        held.wait()
        by_name = {shard.logical.name: tensor for shard, tensor in state.shards}
        expected = [b"".join(by_name[name].view(torch.uint8).numpy().tobytes() for name in names) for names in ("dca", "b")]
        assert [os.pread(memory, plan.nbytes, plan.start) for plan in files] == expected
        assert [b"".join(live(state)(plan)) for plan in files] == expected
        for _, tensor in state.shards:
            tensor.add_(1)


def test_it_grows_with_the_state(memory: int) -> None:
    held = Buffers(memory)
    for count in (10, 100_000, 10):
        state = state_of(("a", "master", torch.full((count,), float(count))))
        files = arrange([shard for shard, _ in state.shards], 0)
        held.copy(state, files)
        held.wait()
        assert os.pread(memory, 4 * count, 0) == state.shards[0][1].numpy().tobytes()


def test_a_rank_without_shards_has_an_empty_file(memory: int) -> None:
    files = arrange([], 2)
    Buffers(memory).copy(State([]), files)
    assert [(plan.name, plan.nbytes) for plan in files] == [("rank_00002.safetensors", 0)]


def test_too_little_memory_is_a_letter(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "free_memory", lambda: 1000)
    state = state_of(("a", "master", torch.zeros(1000)))
    with pytest.raises(SaveError, match="1000 bytes; expected 4000 bytes") as caught:
        Buffers(memory).copy(state, arrange([shard for shard, _ in state.shards], 0))
    assert caught.value.write == "checkpoint=sync"


def test_free_memory_is_below_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < free_memory() < total

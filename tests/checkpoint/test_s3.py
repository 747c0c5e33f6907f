"""Checkpoints behind s3://, against a server on this host: the rules of test_store.py, and whole runs that are killed and go on."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from framework.checkpoint.errors import CheckpointError, SaveError
from framework.checkpoint.load import load
from framework.checkpoint.manifest import MANIFEST
from framework.checkpoint.store import Store
from tests import runs
from tests.checkpoint.layouts import state_of
from tests.ranks import Job, free_port
from tests.runs import PLAIN
from tests.s3 import BUCKET, s3_server
from tests.starts import assert_one_letter

pytest.importorskip("s3fs")
from botocore.exceptions import EndpointConnectionError

Save = Callable[..., Path]


@pytest.fixture(scope="module")
def place() -> Iterator[Mapping[str, str]]:
    """The environment of a server's clients."""
    with s3_server() as environment:
        yield environment


@pytest.fixture
def inside(place: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is such a client."""
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("inside")
def test_the_rules_of_the_store_hold(save: Save, tensors: dict[str, Tensor]) -> None:
    root = f"s3://{BUCKET}/rules/run"
    store = Store(root)
    assert store.newest() is None
    for step in (800, 900, 1000):
        save(step, data_ranks=2, root=root)
    for checkpoint in store.complete():
        store.verify(checkpoint)
    store.files.rm_file(f"{store.path}/step_00001000/{MANIFEST}")
    assert store.scan().unfinished == ["step_00001000"]
    save(1100, data_ranks=4, root=root)
    save(1100, data_ranks=2, root=root)  # again, on fewer ranks: nothing of the four is left
    store.verify(store.open("step_00001100"))
    assert store.prune(1100, keep_last=2) == [800]
    assert [checkpoint.step for checkpoint in store.complete()] == [900, 1100]
    assert store.set_aside(900) == [f"step_00001100/aside_{MANIFEST}"]  # the other has no manifest: it does not count
    assert [checkpoint.step for checkpoint in store.complete()] == [900]
    store.files.pipe_file(f"{store.path}/step_00000900/rank_00000.safetensors", b"short")
    with pytest.raises(CheckpointError, match="5 bytes"):
        store.newest()


@pytest.mark.usefixtures("inside")
def test_another_layout_reads_only_what_it_needs(save: Save, tensors: dict[str, Tensor]) -> None:
    save(1, 2, 2, root=f"s3://{BUCKET}/layouts")
    checkpoint = Store(f"s3://{BUCKET}/layouts").open("step_00000001")
    for rank in range(3):
        expected = state_of(tensors, 1, 3, rank).shards
        filled = [(shard, torch.zeros_like(tensor)) for shard, tensor in expected]
        assert load(checkpoint, filled) == sum(shard.nbytes for shard, _ in expected)
        assert all(torch.equal(got, want) for (_, got), (_, want) in zip(filled, expected, strict=True))


@pytest.mark.usefixtures("inside")
def test_a_connection_that_breaks_is_a_letter(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise EndpointConnectionError(endpoint_url="there")

    root = f"s3://{BUCKET}/broken"
    save(1, root=root)
    for name, error in (("pipe_file", SaveError), ("makedirs", SaveError), ("ls", CheckpointError)):
        with monkeypatch.context() as patch:
            patch.setattr(Store(root).files, name, broken)  # fsspec gives everybody the same object
            with pytest.raises(error, match="Could not connect"):
                save(2, root=root) if error is SaveError else Store(root).newest()
    assert [checkpoint.step for checkpoint in Store(root).complete()] == [1]


def enter(place: Mapping[str, str]) -> None:
    os.environ.update(place)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_a_letter_before_the_first_step(place: Mapping[str, str], tmp_path: Path) -> None:
    nowhere = {**place, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_MAX_ATTEMPTS": "1"}
    words = [*PLAIN, "checkpoint=sync", f"checkpoint.root=s3://{BUCKET}/run", "steps=2"]
    assert_one_letter(runs.train(words, tmp_path, code=2, prepare=functools.partial(enter, nowhere)), "Could not connect")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.usefixtures("inside")
def test_a_killed_run_goes_on_bit_for_bit(mode: str, place: Mapping[str, str], tmp_path: Path) -> None:
    words = [*PLAIN, "model.dropout=0.1", "steps=60"]
    runs.train([*words, "name=straight", "checkpoint=none"], tmp_path)
    saves = [f"checkpoint={mode}", f"checkpoint.root=s3://{BUCKET}/{mode}/run", "checkpoint.every=3", "checkpoint.keep_last=2"]
    store = Store(f"s3://{BUCKET}/{mode}/run")
    with Job(["framework.train", *words, *saves], None, tmp_path, place) as job:
        deadline = time.monotonic() + 120
        while len(store.complete()) < 2:
            assert job.running(), job.output()
            assert time.monotonic() < deadline, job.output()
            time.sleep(0.1)
    run = tmp_path / "runs" / "run"
    assert max(runs.losses(run)) < 60
    runs.train([*words, *saves], tmp_path, prepare=functools.partial(enter, place))
    [resumed] = runs.events(run, "resume")
    assert resumed["step"] >= 6
    assert runs.losses(run) == runs.losses(run.with_name("straight"))
    for checkpoint in store.complete():
        store.verify(checkpoint)
    assert store.complete()[-1].step == 60
    assert store.scan().unfinished == []

"""framework/data/stream.py: every token says where it lies in the corpus, so that what was read can be told from the ids alone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from framework.base.errors import DataError, RunError
from framework.data import stream as stream_module
from framework.data.pack import IGNORE, MicroBatch
from framework.data.stream import StreamSettings, TrainingStream, default_workers, validation_batches
from framework.data.tokens import Corpus, TokenFile, write_tokens
from tests.bench import data as data_bench

CPU = torch.device("cpu")
SEQ = 4
SETTINGS = StreamSettings(
    seed=3, shuffle=True, micro_size=2, accumulation=1, data_rank=0, data_size=1, workers=0, prefetch=2, vocab_size=1000
)


def corpus_of(folder: Path, samples: int) -> Corpus:
    """Tokens 0, 1, 2, ...: sample k begins with token k * SEQ."""
    write_tokens(folder / "numbers", [np.arange(samples * SEQ + 1)], np.dtype("int32"))
    return Corpus([TokenFile(str(folder / "numbers"))], SEQ)


def take(stream: TrainingStream, consumed: int, steps: int) -> list[list[MicroBatch]]:
    iterator = stream.start(consumed)
    taken = [next(iterator) for _ in range(steps)]
    stream.close()
    return taken


def samples_read(steps: list[list[MicroBatch]]) -> list[int]:
    """Positions in the corpus, told from the ids."""
    return [int(row[0]) // SEQ for step in steps for micro in step for row in micro.ids]


def runs(pid: int) -> bool:
    """Not gone, and no zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def workers_alive() -> int:
    return len(multiprocessing.active_children())


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_reading_is_the_tail_of_unbroken_reading(tmp_path: Path, workers: int) -> None:
    stream = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=workers), CPU)
    whole = samples_read(take(stream, 0, 12))
    for steps in (1, 5, 7):  # within an epoch of 5 steps, at its edge, within the next
        assert whole[: 2 * steps] + samples_read(take(stream, 2 * steps, 12 - steps)) == whole
    assert sorted(whole[:10]) == sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_next_token_as_target(tmp_path: Path, workers: int) -> None:
    stream = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=workers, shuffle=False, accumulation=2), CPU)
    (first, second), _ = take(stream, 4, 2)
    assert first.ids.tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert first.targets.tolist() == [[17, 18, 19, 20], [21, 22, 23, 24]]
    assert (first.indices.tolist(), second.indices.tolist()) == ([4, 5], [6, 7])
    for tensor in (first.ids, first.targets, first.indices):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_every_layout_reads_the_same_sets(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 37)
    sets = []
    for ranks, micro in ((1, 2), (2, 1), (2, 4), (4, 2), (1, 8)):
        layout = replace(SETTINGS, micro_size=micro, accumulation=8 // (ranks * micro), data_size=ranks)
        reads = [take(TrainingStream(corpus, replace(layout, data_rank=rank), CPU), 5, 10) for rank in range(ranks)]
        sets.append([sorted(samples_read([steps[k] for steps in reads])) for k in range(10)])
    assert all(one == sets[0] for one in sets)
    assert all(len(step) == 8 for step in sets[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_context_ranks_read_slices_of_the_same_samples(tmp_path: Path, workers: int) -> None:
    """Joined, they are what one rank reads; the last target of a slice is the first token of the next."""
    corpus, settings = corpus_of(tmp_path, 10), replace(SETTINGS, workers=workers)
    [whole], *_ = take(TrainingStream(corpus, settings, CPU), 2, 1)
    slices = [take(TrainingStream(corpus, replace(settings, context_rank=rank, context_size=2), CPU), 2, 1)[0][0] for rank in (0, 1)]
    for name in ("ids", "targets"):
        assert torch.equal(torch.cat([getattr(slice_, name) for slice_ in slices], dim=1), getattr(whole, name))
    assert slices[0].targets[:, -1].tolist() == slices[1].ids[:, 0].tolist()
    assert all(torch.equal(slice_.indices, whole.indices) for slice_ in slices)
    held_out = [next(validation_batches(corpus, replace(settings, context_rank=rank, context_size=2), 0, CPU)) for rank in (0, 1)]
    assert torch.equal(torch.cat([batch.ids for batch in held_out], dim=1), next(validation_batches(corpus, settings, 0, CPU)).ids)


DOCUMENTS = [5, 7, 1, 1, 3, 12, 2, 9]
ROW = 12


def documents_of(folder: Path) -> Corpus:
    """Tokens 0, 1, 2, ... in documents of 5, 7, 1, ... tokens: three rows of twelve."""
    ends = np.cumsum(DOCUMENTS)
    write_tokens(folder / "apart", np.split(np.arange(ends[-1]), ends[:-1]), np.dtype("int32"))
    return Corpus([TokenFile(str(folder / "apart"))], ROW, apart=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_documents_apart(tmp_path: Path, context: int, workers: int) -> None:
    """By hand: 5 and 7 tokens; 1, 1, 3 and seven of 12; the last five of those, 2, and five of 9."""
    wanted_starts = [[0] * 5 + [5] * 7, [0, 1, 2, 2, 2] + [5] * 7, [0] * 5 + [5, 5] + [7] * 5]
    without_loss = [[4, 11], [0, 1, 4], [4, 6]]
    corpus, settings = documents_of(tmp_path), replace(SETTINGS, shuffle=False, micro_size=3, workers=workers, context_size=context)
    found = []
    for rank in range(context):
        [[micro]] = take(TrainingStream(corpus, replace(settings, context_rank=rank), CPU), 0, 1)
        held_out = next(validation_batches(corpus, replace(settings, context_rank=rank), 0, CPU))
        for name in ("ids", "targets", "starts"):
            assert torch.equal(getattr(micro, name), getattr(held_out, name))
            assert getattr(micro, name).dtype == torch.int64
            assert getattr(micro, name).is_contiguous()
        assert micro.starts is not None
        assert micro.starts.tolist() == wanted_starts  # on every context rank of the whole rows
        assert [micro.ids, micro.targets, micro.starts] == [*micro.inputs]
        found.append(micro)
    ids, targets = (torch.cat([getattr(micro, name) for micro in found], dim=1).tolist() for name in ("ids", "targets"))
    assert ids == [list(range(row * ROW, (row + 1) * ROW)) for row in range(3)]
    for row in range(3):
        assert targets[row] == [IGNORE if place in without_loss[row] else row * ROW + place + 1 for place in range(ROW)]


def test_joined_rows_carry_nothing_more(tmp_path: Path) -> None:
    corpus = documents_of(tmp_path)
    joined = Corpus(corpus.files, ROW)
    [[micro]] = take(TrainingStream(joined, replace(SETTINGS, shuffle=False), CPU), 0, 1)
    assert micro.starts is None
    assert len(micro.inputs) == 2
    assert not (micro.targets == IGNORE).any()


def test_rows_past_the_end_keep_their_ids_in_a_micro_batch_of_one(tmp_path: Path) -> None:
    """Three samples over two ranks: the second rank's last row repeats sample 0, and none of its targets counts."""
    settings = replace(SETTINGS, micro_size=1, data_size=2, data_rank=1)
    last = list(validation_batches(corpus_of(tmp_path, 3), settings, 0, CPU))[-1]
    assert last.ids.tolist() == [[0, 1, 2, 3]]
    assert last.targets.tolist() == [[IGNORE] * SEQ]


@pytest.mark.parametrize("workers", [0, 2])
def test_global_random_numbers_are_not_touched(tmp_path: Path, workers: int) -> None:
    corpus, settings = corpus_of(tmp_path, 10), replace(SETTINGS, workers=workers)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    take(TrainingStream(corpus, settings, CPU), 0, 7)
    list(validation_batches(corpus, settings, 0, CPU))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_outside_the_vocabulary_is_a_letter(tmp_path: Path, workers: int) -> None:
    corpus = corpus_of(tmp_path, 10)
    stream = TrainingStream(corpus, replace(SETTINGS, shuffle=False, workers=workers, vocab_size=32), CPU)
    iterator = stream.start(0)
    for _ in range(3):  # samples 0 to 5 hold the tokens 0 to 24
        next(iterator)
    with pytest.raises(DataError) as caught:
        next(iterator)  # samples 6 and 7: 24 to 32
    error = caught.value
    assert error.subject.endswith("numbers.bin")
    assert "token id 32 in sample 7" in str(error.got)
    assert "0 to 31" in error.expected
    assert "Traceback" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    assert workers_alive() == 0
    with pytest.raises(DataError, match="token id 32"):
        list(validation_batches(corpus, replace(SETTINGS, vocab_size=32), 0, CPU))


def test_a_negative_token_is_a_letter(tmp_path: Path) -> None:
    write_tokens(tmp_path / "negative", [np.array([1, 2, -7, 3, 4])], np.dtype("int32"))
    stream = TrainingStream(Corpus([TokenFile(str(tmp_path / "negative"))], SEQ), SETTINGS, CPU)
    with pytest.raises(DataError, match="token id -7 in sample 0"):
        next(stream.start(0))


def test_a_killed_worker_is_a_letter(tmp_path: Path) -> None:
    iterator = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=2), CPU).start(0)
    next(iterator)
    victim = multiprocessing.active_children()[0].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RunError, match="data loader process") as caught:
        list(itertools.islice(iterator, 100))
    assert str(victim) in str(caught.value.got)
    assert caught.value.__context__ is None
    assert workers_alive() == 0


def stuck(mark: Path, often: int, begin: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
    """A first line that the first process of each of the first `often` starts does not reach, as after a fork that met a held lock."""

    def begin_or_not(trainer: int, tell: int, worker: int) -> None:
        if worker == 0 and len(starts := list(mark.iterdir())) < often:
            (mark / str(len(starts))).touch()
            time.sleep(600)
        begin(trainer, tell, worker)

    return begin_or_not


@pytest.mark.parametrize("often", [1, 2, 9])
def test_a_loader_process_that_does_not_begin_is_replaced(often: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts").mkdir()
    stream = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=2), CPU)
    plain = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=0), CPU)
    wanted = [micro.ids for step in itertools.islice(plain.start(0), 8) for micro in step]
    monkeypatch.setattr(stream_module, "_become_worker", stuck(tmp_path / "starts", often, stream_module._become_worker))
    monkeypatch.setattr(stream_module, "BEGIN_S", 1.0)
    if often > stream_module.STARTS:
        with pytest.raises(RunError, match="data loader processes"):
            stream.start(0)
    else:
        found = [micro.ids for step in itertools.islice(stream.start(0), 8) for micro in step]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        stream.close()
    assert workers_alive() == 0


def test_workers_ignore_signals_and_end_on_close(tmp_path: Path) -> None:
    stream = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=2), CPU)
    before = signal.getsignal(signal.SIGCHLD)
    iterator = stream.start(0)
    next(iterator)
    assert signal.getsignal(signal.SIGCHLD) is before
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
    for _ in range(30):
        next(iterator)
    assert workers_alive() == 2
    stream.close()
    stream.close()
    assert workers_alive() == 0


def test_a_new_start_ends_the_workers_of_the_old_one_only(tmp_path: Path) -> None:
    stream = TrainingStream(corpus_of(tmp_path, 10), replace(SETTINGS, workers=1), CPU)
    first = stream.start(0)
    next(first)
    second = stream.start(4)
    del first  # collected after the second start: must not end what it does not own
    assert next(second)[0].indices.tolist() == [4, 5]
    assert workers_alive() == 1
    del second
    assert workers_alive() == 0


def test_the_wait_for_data_is_measured(tmp_path: Path) -> None:
    class Slow(Corpus):
        def read(self, positions: np.ndarray) -> np.ndarray:
            time.sleep(0.05)
            return super().read(positions)

    stream = TrainingStream(Slow(corpus_of(tmp_path, 10).files, SEQ), replace(SETTINGS, accumulation=2), CPU)
    iterator = stream.start(0)
    for _ in range(2):
        next(iterator)
        time.sleep(1.0)  # the trainer's own time is not waiting
        assert 0.1 <= stream.wait_s < 1.0


def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    corpus_of(tmp_path, 10)
    program = f"""
import torch
from framework.data.stream import StreamSettings, TrainingStream
from framework.data.tokens import Corpus, TokenFile
corpus = Corpus([TokenFile({str(tmp_path / "numbers")!r})], 4)
stream = TrainingStream(corpus, StreamSettings(1, True, 2, 1, 0, 1, 2, 2, 1000), torch.device("cpu"))
iterator = stream.start(0)
next(iterator)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_workers_do_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    corpus_of(tmp_path, 10)
    program = f"""
import multiprocessing, os, signal, torch
from framework.data.stream import StreamSettings, TrainingStream
from framework.data.tokens import Corpus, TokenFile
corpus = Corpus([TokenFile({str(tmp_path / "numbers")!r})], 4)
iterator = TrainingStream(corpus, StreamSettings(1, True, 2, 1, 0, 1, 2, 2, 1000), torch.device("cpu")).start(0)
next(iterator)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The workers hold the pipe too: run() comes back when the last of them has closed it, on its way out.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(runs(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} live on"
        time.sleep(0.05)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_int64_and_in_memory_of_their_own(tmp_path: Path, dtype: str, workers: int) -> None:
    """Whatever type the file has: an ignored target changes no id, and nobody writes into the file's map."""
    write_tokens(tmp_path / "numbers", [np.arange(9)], np.dtype(dtype))
    corpus = Corpus([TokenFile(str(tmp_path / "numbers"))], 8)
    ((batch,),) = take(TrainingStream(corpus, replace(SETTINGS, micro_size=1, workers=workers), CPU), 0, 1)
    assert (batch.ids.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    batch.targets[:] = IGNORE
    assert batch.ids.tolist() == [[*range(8)]]
    batch.ids[:] = 0
    assert corpus.read(np.array([0])).tolist() == [[*range(9)]]


def test_opening_a_large_corpus_costs_nothing(tmp_path: Path) -> None:
    """A first shuffled micro-batch out of 2^31 tokens in 2 million documents, in a fresh process: under 100 MB."""
    assert data_bench.opened(tmp_path)["megabytes"] < 100


@pytest.mark.parametrize(("samples", "count"), [(0, 7), (3, 3), (100, 7), (4, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_held_out_samples_are_read_once_by_equal_ranks(tmp_path: Path, samples: int, count: int, ranks: int) -> None:
    corpus = corpus_of(tmp_path, 7)
    settings = replace(SETTINGS, data_size=ranks)
    reads = [list(validation_batches(corpus, replace(settings, data_rank=rank), samples, CPU)) for rank in range(ranks)]
    assert {len(batches) for batches in reads} == {-(-count // (2 * ranks))}
    seen = []
    for batch in (batch for batches in reads for batch in batches):
        assert batch.ids.shape == batch.targets.shape == (2, SEQ)
        for ids, targets, index in zip(batch.ids, batch.targets, batch.indices.tolist(), strict=True):
            assert 0 <= int(ids.min()) <= int(ids.max()) < 29
            if index < count:
                seen.append(index)
                assert ids.tolist() == list(range(index * SEQ, index * SEQ + SEQ))
                assert targets.tolist() == [token + 1 for token in ids.tolist()]
            else:
                assert targets.tolist() == [IGNORE] * SEQ
    assert sorted(seen) == list(range(count))


def test_default_workers() -> None:
    assert [default_workers(cores, ranks) for cores, ranks in ((2, 2), (1, 4), (64, 4), (128, 8), (12, 4))] == [1, 1, 8, 8, 3]

"""Collectives as they are seen from outside: exposed where this process waits, hidden where it computes meanwhile."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from framework.topology.grid import Grid
from framework.topology.groups import connect, make_groups
from framework.topology.timers import Timers
from framework.topology.traffic import Traffic, covered
from tests.ranks import run_ranks

LATE_S = 0.4


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([]) == 0.0
    assert covered([(1.0, 2.0), (4.0, 6.0)]) == 3.0
    assert covered([(4.0, 6.0), (1.0, 5.0), (2.0, 3.0)]) == 5.0


def exchanges(rank: int, ranks: int) -> dict[str, tuple[float, float]]:
    """What -> (exposed, hidden) on this rank; rank 1 comes late to everything."""
    connect(60.0, shm_comm=False)
    groups = make_groups(Grid(data=ranks), rank, 60.0)
    timers = Timers()
    traffic = Traffic(timers, torch.device("cpu"))
    before = dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]
    traffic.watch()
    found: dict[str, tuple[float, float]] = {}
    value = torch.ones(8)

    def note(what: str) -> None:
        found[what] = timers.take()["communication"], traffic.hidden()

    def late() -> None:
        if rank == 1:
            time.sleep(LATE_S)

    groups.agree([0.0])
    note("begin")
    late()
    dist.all_reduce(value)
    note("waited for at once")
    late()
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    time.sleep(1.5 * LATE_S)
    work.wait()
    note("computed meanwhile")
    late()
    parts = torch.empty(4)
    work = dist.reduce_scatter_tensor(parts, value, async_op=True)  # whose end gloo does not tell
    assert work is not None
    time.sleep(LATE_S)
    work.wait()
    note("scattered")
    groups.agree([0.0])
    timers.take()
    late()
    groups.gather({"an": "object"})
    note("objects")
    late()
    dist.send(value, 1) if rank == 0 else dist.recv(value, 0)
    note("point to point")
    traffic.end()
    assert (dict(vars(dist.ProcessGroup)), vars(dist.Work)["wait"]) == before
    dist.all_reduce(value)
    assert timers.take()["communication"] == 0.0
    return found


def test_what_the_early_rank_waits_for_is_exposed_unless_it_computes() -> None:
    early, late = run_ranks(exchanges, 2, env={"OMP_NUM_THREADS": "1"})
    assert early["waited for at once"][0] == pytest.approx(LATE_S, abs=0.35)
    assert early["waited for at once"][1] == 0.0
    assert early["computed meanwhile"][0] < LATE_S / 2
    assert early["computed meanwhile"][1] == pytest.approx(LATE_S, abs=0.35)
    assert early["scattered"][1] == pytest.approx(LATE_S, abs=0.35)
    assert early["objects"][0] == pytest.approx(LATE_S, abs=0.35)
    for what in ("waited for at once", "computed meanwhile", "objects"):
        assert late[what][0] < LATE_S, what

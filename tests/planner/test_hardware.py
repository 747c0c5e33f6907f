"""The hardware table: names, who shares a link, what a rank of a CPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from framework.base.errors import ConfigError
from framework.planner.hardware import CPU, ENTRIES, Link, Site, named, recognised, this_machine

H100 = named("h100_80gb")


def test_every_entry_has_a_source_and_plausible_figures() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 8
    for entry in ENTRIES:
        assert entry.source
        assert entry.host.source
        assert entry.reached.source
        assert 0 < entry.reached.products <= 1
        if not entry.shared:
            assert entry.products["bf16"] > entry.products["fp32"]
            assert entry.host.inside.bandwidth >= entry.host.across.bandwidth
            assert f"_{entry.memory // 10**9}gb" in entry.name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        named("h10080gb")
    assert refused.value.write == "plan.hardware=h100_80gb"


def test_a_ring_inside_a_host_has_the_inner_link() -> None:
    assert Site(H100, 8).link(1, 8) == Link(450e9 * 0.8, 4e-6)
    assert Site(H100, 8).link(4, 2) == Link(450e9 * 0.8, 4e-6)


@pytest.mark.parametrize(
    ("stride", "degree", "ports"),
    [(1, 16, 8), (2, 8, 4), (8, 2, 1), (16, 4, 1)],  # ranks of one ring on one host, each with a port of 400 Gb/s
)
def test_a_ring_over_hosts_has_the_ports_of_its_ranks_there(stride: int, degree: int, ports: int) -> None:
    assert Site(H100, 8).link(stride, degree).bandwidth == pytest.approx(min(450e9, ports * 50e9) * 0.8)


def test_ranks_share_a_cpu() -> None:
    two = replace(CPU, memory=24 * 2**30, cores=2, host=replace(CPU.host, memory=24 * 2**30))
    alone, both = Site(two, 1), Site(two, 2)
    assert both.memory == 12 * 2**30
    assert alone.products("fp32") == 2 * both.products("fp32") == 2 * CPU.products["fp32"]
    assert alone.bandwidth == 2 * both.bandwidth


def test_this_machine_is_what_linux_shows() -> None:
    total = next(line for line in open("/proc/meminfo") if line.startswith("MemTotal"))  # noqa: SIM115
    assert this_machine().memory == pytest.approx(int(total.split()[1]) * 1024, rel=0.01)
    assert this_machine().cores >= 1


def test_peaks_of_a_rank_and_entries_by_their_drivers_names() -> None:
    two = Site(replace(CPU, cores=4), 2)
    assert two.peaks["fp32"] == 2 * CPU.products["fp32"]
    assert two.peak_bandwidth == 2 * CPU.bandwidth
    assert Site(named("h100_80gb"), 8).peaks["bf16"] == 989e12
    for device, memory, entry in (
        ("NVIDIA H200", 150 * 10**9, "h200_141gb"), ("NVIDIA A100-SXM4-40GB", 42 * 10**9, "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", 85 * 10**9, "a100_80gb"), ("AMD Instinct MI300X", 206 * 10**9, "mi300x_192gb"),
    ):  # fmt: skip
        found = recognised(device, memory)
        assert found is not None
        assert found.name == entry
    assert recognised("NVIDIA GB200", 190 * 10**9) is None

"""zero=stage3_nvme: what is refused before the ranks meet, and, where libaio is, a real run whose state lies on a local disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from deepspeed.ops import op_builder
from torch.utils.cpp_extension import _get_build_directory

from framework.base.errors import EXIT_REFUSED, ConfigError, StartError
from framework.config.compose import compose
from framework.planner.states import rank_of, static
from framework.topology.grid import Grid
from framework.trainer.swapping import refuse_unready
from tests import runs
from tests.ranks import launch
from tests.starts import assert_one_letter

BUILDER: Any = op_builder.AsyncIOBuilder  # type: ignore[attr-defined]
NVME = ["zero=stage3_nvme", "checkpoint=none"]
# The parts of a rank of the feed-forward matrices, of the embedding and of the optimizer group with all matrices are above 1 MiB.
LARGE = [*runs.SMALL, "steps=4", "model.hidden_size=512", "model.num_heads=4", "model.ffn_hidden_size=2048", "model.vocab_size=2048"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero\.nvme_path"):
        refuse_unready(compose([*NVME, f"zero.nvme_path={tmp_path}/absent"]))
    said = runs.train([*runs.SMALL, *NVME, "zero.nvme_path=absent"], tmp_path, code=EXIT_REFUSED)
    assert_one_letter(said, "zero.nvme_path", "a folder on a local disk")
    assert not (tmp_path / "runs/run").exists()


def test_without_libaio_the_letter_says_what_to_install(tmp_path: Path) -> None:
    with mock.patch.object(BUILDER, "is_compatible", return_value=False), pytest.raises(StartError, match="libaio-dev"):
        refuse_unready(compose([*NVME, f"zero.nvme_path={tmp_path}"]))


def test_other_runs_are_not_asked_for_it() -> None:
    with mock.patch.object(BUILDER, "is_compatible", side_effect=AssertionError):
        refuse_unready(compose(["zero=stage3_offload"]))


@pytest.mark.slow
def test_a_run_on_a_local_disk_has_the_losses_of_one_in_memory(tmp_path: Path) -> None:
    if not BUILDER().is_compatible():
        pytest.skip("no libaio: DeepSpeed's async_io cannot be compiled")
    words = [*LARGE, "checkpoint=none"]
    disk = tmp_path / "disk"
    disk.mkdir()
    # async_io takes minutes to compile: once on a machine.
    usual = {"TORCH_EXTENSIONS_DIR": str(Path(_get_build_directory("async_io", verbose=False)).parent)}
    for more in (["zero=stage3", "name=memory"], [*NVME, f"zero.nvme_path={disk}", "name=disk"]):
        done = launch(["framework.train", *words, *more], 2, tmp_path, timeout=1200, env=usual)
        assert done.code == 0, done.stdout + done.stderr
    memory, swapped = runs.losses(tmp_path / "runs/memory"), runs.losses(tmp_path / "runs/disk")
    assert list(swapped) == list(memory) == [1, 2, 3, 4]
    for step, (loss, norm) in memory.items():
        assert swapped[step][0] == pytest.approx(loss, abs=1e-6)
        assert swapped[step][1] == pytest.approx(norm, rel=1e-5)
    written = {str(path.relative_to(disk / "zero_stage_3")): path.stat().st_size for path in disk.rglob("*.swp")}
    config = compose([*words, *NVME, f"zero.nvme_path={disk}"])
    paper = static(config, rank_of(config, Grid(data=2))).disk
    for rank in (0, 1):
        of_rank = {name: size for name, size in written.items() if f"/rank{rank}/" in f"/{name}"}
        assert sum(of_rank.values()) == sum(paper.values())
        assert sum(size for name, size in of_rank.items() if "params" in name) == paper["parameters"] > 2**20

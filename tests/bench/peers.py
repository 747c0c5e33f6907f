"""The same state saved by others: DeepSpeed's save_checkpoint and torch.distributed.checkpoint's async_save, each as its manual has it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from framework.engine import state as engine_state


class Peers:
    """Saves below `folder`; the newest `kept` of each kind stay. `engine` is a DeepSpeedEngine of ours."""

    def __init__(self, folder: Path, engine: Any, kept: int) -> None:
        self.folder, self.engine, self.kept = folder, engine, kept
        self.group: Any = dist.new_group(backend="gloo")  # its background thread needs one that the training does not use
        self.writing: Any = None

    def deepspeed_save(self, step: int) -> None:
        self.engine.engine.save_checkpoint(str(self.folder / "deepspeed"), tag=f"step_{step:08d}")

    def dcp_async_save(self, step: int) -> None:
        """The tensors that we save, as they are: each rank has keys of its own."""
        rank = dist.get_rank()
        state = {f"{rank}|{shard.key}": tensor for shard, tensor in engine_state.collect(self.engine)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.writing = async_save(state, checkpoint_id=str(self.folder / "dcp" / f"step_{step:08d}"), process_group=self.group)

    def finish(self) -> None:
        """Wait for what is being written, and let old ones go. Every rank calls it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None
        dist.barrier()
        if dist.get_rank() == 0:
            for kind in ("deepspeed", "dcp"):
                for old in sorted((self.folder / kind).glob("step_*"))[: -self.kept]:
                    shutil.rmtree(old)
        dist.barrier()

    def nbytes(self) -> dict[str, int]:
        """Bytes of the newest checkpoint of each kind."""
        return {kind: tree_bytes(max((self.folder / kind).glob("step_*"))) for kind in ("deepspeed", "dcp")}


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""The grid as DeepSpeed sees it: its `mpu`, with the names that it asks for. It knows pipe, data and model; model is our tensor."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from framework.topology.groups import Groups


class Axes:
    """Handed to deepspeed.initialize where tensor ranks share a replica: norms and overflows are then agreed over `replica`."""

    def __init__(self, groups: Groups) -> None:
        assert groups.replica is not None, "without tensor ranks DeepSpeed needs no mpu"
        self._data: Any = groups.data
        self._model: Any = groups.replica

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._model)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

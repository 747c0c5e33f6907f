"""An engine's State: where the tensors and counters are that decide the next step, and how they are put back.

The only file that knows where DeepSpeed keeps them. Every tensor is named by the `.logical` of its parameter, so what is
collected under one ZeRO stage and number of ranks can be restored under another. Reads and fills live memory; no files.

What the inner optimizer updates is the truth (fp32 masters, or the weights themselves where they are fp32); half weights,
gathered copies and DeepSpeed's own counters of micro-batches follow from it, and are not kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from framework.checkpoint.shards import Logical, Shard, equal_parts
from framework.checkpoint.state import dtype_name
from framework.engine.engine import PlainEngine

if TYPE_CHECKING:
    from framework.engine.sharded import DeepSpeedEngine

    AnyEngine = DeepSpeedEngine | PlainEngine

log = logging.getLogger(__name__)

Collected = list[tuple[Shard, Tensor]]
Parameter = Any  # an nn.Parameter with `.logical`, and with what DeepSpeed has hung on it

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
"""torch's name of an optimizer's tensor -> the kind of its shard."""

DEEPSPEED_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
GRADSCALER_COUNTERS = ("scale", "_growth_tracker")
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def collect(engine: AnyEngine, complete: bool = False) -> Collected:
    """The shards that this rank has to write, each with a flat view of the live memory that holds it.

    Over all ranks every element of every logical tensor comes once: what several ranks hold is divided among them. With
    `complete` a rank gets all that it holds, which is what it must be given to go on. Kinds: "master" (fp32) and the moments
    of trained parameters, "weight" of frozen ones in their own type.
    """
    inner = inner_optimizer(engine)
    _make_moments(engine, inner)
    collected: Collected = []
    for piece in _pieces(engine):
        if not (complete or piece.logical.primary):
            continue
        first, length = (0, piece.length) if complete else piece.share
        for kind, tensor in piece.tensors(inner) if length else ():
            shard = Shard(kind, piece.logical, piece.start + first, length, dtype_name(tensor.dtype))
            collected.append((shard, tensor.narrow(0, first, length)))
    return collected


def counters(engine: AnyEngine) -> dict[str, Any]:
    """The numbers beside the tensors, as plain data; the same on every rank.

    applied         updates applied, which the schedule is keyed on
    optimizer_step  the inner optimizer's own count of updates (0 for one that keeps none)
    scaler          state of the loss scaler, or None: {"kind": "dynamic" | "gradscaler", ...}
    deepspeed       its counters of steps and samples, or None
    """
    steps = {int(state["step"]) for state in inner_optimizer(engine).state.values() if "step" in state}
    assert len(steps) <= 1, f"the optimizer has updated its parameters {sorted(steps)} times"
    outer = None if isinstance(engine, PlainEngine) else engine.engine
    return {
        "applied": engine.applied,
        "optimizer_step": steps.pop() if steps else 0,
        "scaler": _scaler_state(engine),
        "deepspeed": {name: int(getattr(outer, name)) for name in DEEPSPEED_COUNTERS} if outer else None,
    }


def restore(engine: AnyEngine, load: Callable[[Collected], None], kept: dict[str, Any]) -> None:
    """Put a State into a new engine: `load` fills the given views in place, `kept` is what `counters` gave.

    Every rank of the data group calls it. Afterwards the next step is the one that the saved engine would have made, under
    this engine's layout.
    """
    inner = inner_optimizer(engine)
    _make_moments(engine, inner)
    with torch.no_grad():
        load(collect(engine, complete=True))
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(kept["optimizer_step"])
        _refresh_weights(engine)
    engine.applied = kept["applied"]
    _restore_scaler(engine, kept["scaler"])
    if not isinstance(engine, PlainEngine):
        # Not its count of micro-batches: it finds the last one of a step by it, and another layout has another number of them.
        for name in DEEPSPEED_COUNTERS if kept["deepspeed"] else ():
            setattr(engine.engine, name, kept["deepspeed"][name])


def hashes(engine: AnyEngine, tensors: dict[str, str] | None = None) -> dict[str, str]:
    """xxh3_128 of this rank's live weights and of its optimizer (masters, moments, counters): {"weights": .., "optimizer": ..}.

    `tensors` is what tensor_hashes gives, where the caller has it already.
    """
    sums = {"weights": xxhash.xxh3_128(), "optimizer": xxhash.xxh3_128()}
    for name, value in (tensors or tensor_hashes(engine)).items():
        sums["weights" if name.startswith("live ") else "optimizer"].update(f"{name}={value};".encode())
    sums["optimizer"].update(json.dumps(counters(engine), sort_keys=True).encode())
    return {name: value.hexdigest() for name, value in sums.items()}


def live_hash(engine: AnyEngine) -> str:
    """One hash over what the forward pass reads on this rank: equal on all data ranks below ZeRO stage 3."""
    whole = xxhash.xxh3_128()
    for name, tensor in _live_weights(engine):
        whole.update(f"{name} {_hash(tensor)}".encode())
    return whole.hexdigest()


def tensor_hashes(engine: AnyEngine) -> dict[str, str]:
    """xxh3_128 of each tensor that this rank holds: "KIND NAME" for what is collected, "live NAME" for what the forward pass reads."""
    found = {f"{shard.kind} {shard.logical.name}": _hash(tensor) for shard, tensor in collect(engine, complete=True)}
    return found | {f"live {name}": _hash(tensor) for name, tensor in _live_weights(engine)}


@dataclass(frozen=True)
class _Piece:
    """Elements `start` to `start + length` of a parameter (flat, as this rank's tensor has it), and where they are kept.

    `home` is the tensor that the inner optimizer updates (of a frozen parameter: its weights); the piece begins at element
    `offset` of it. `share` is (first, length) of the part of the piece that this rank writes; others hold it too.
    """

    parameter: Parameter
    start: int
    length: int
    home: Tensor
    offset: int
    share: tuple[int, int]

    @property
    def logical(self) -> Logical:
        return self.parameter.logical

    def tensors(self, inner: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
        """(kind, flat view) of the piece and of its moments."""
        yield "master" if self.parameter.requires_grad else "weight", self._view(self.home)
        for key, value in inner.state[self.home].items() if self.parameter.requires_grad else ():
            if key in MOMENTS:
                yield MOMENTS[key], self._view(value)

    def _view(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).narrow(0, self.offset, self.length)


def _pieces(engine: AnyEngine) -> Iterator[_Piece]:
    stage, ranks, rank = _sharding(engine)
    for parameter in module_of(engine).parameters():
        if stage == 3:
            piece = _partition(parameter, _optimizer(engine), rank)
        elif stage == 0 or not parameter.requires_grad:
            size = parameter.numel()
            piece = _Piece(parameter, 0, size, parameter, 0, equal_parts(size, ranks, rank))
        else:
            piece = _fragment(parameter, inner_optimizer(engine))
        if piece is not None:
            yield piece


def _fragment(parameter: Parameter, inner: torch.optim.Optimizer) -> _Piece | None:
    """Stages 1 and 2: the optimizer has one flat tensor per group, this rank's part of all the group's parameters in a row."""
    mapping = parameter._hp_mapping
    if mapping is None:  # other ranks have all of it
        return None
    length = mapping.hp_fragment_address.numel
    home = inner.param_groups[mapping.param_group_index]["params"][0]
    return _Piece(parameter, mapping.lp_fragment_address.start, length, home, mapping.hp_fragment_address.start, (0, length))


def _partition(parameter: Parameter, zero: Any, rank: int) -> _Piece | None:
    """Stage 3: each parameter is divided evenly; the last ranks' parts are padded, or nothing but padding."""
    size = parameter.ds_tensor.ds_numel
    start = rank * size
    length = min(size, parameter.ds_numel - start)
    if length <= 0:
        return None
    if not parameter.requires_grad:
        return _Piece(parameter, start, length, parameter.ds_tensor, 0, (0, length))
    group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
    return _Piece(parameter, start, length, zero.fp32_partitioned_groups_flat[group], offset, (0, length))


def _make_moments(engine: AnyEngine, inner: torch.optim.Optimizer) -> None:
    """What torch's optimizers make at their first update, with the values that it would start from."""
    settings = engine.config.optimizer
    for home in _homes(engine, inner):
        state = inner.state[home]
        if state:
            continue
        if settings.name == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=home.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(home.detach()), torch.zeros_like(home.detach())
        elif settings.momentum:
            state["momentum_buffer"] = torch.zeros_like(home.detach())


def _homes(engine: AnyEngine, inner: torch.optim.Optimizer) -> list[Tensor]:
    if _sharding(engine)[0] == 3:  # hands the inner optimizer one tensor at a time, and nothing between steps
        return _optimizer(engine).fp32_partitioned_groups_flat
    return [home for group in inner.param_groups for home in group["params"]]


def _refresh_weights(engine: AnyEngine) -> None:
    """Make the weights that the forward pass reads from the masters, as the end of a step does."""
    stage, zero = _sharding(engine)[0], _optimizer(engine)
    if stage in (1, 2):
        zero.update_lp_params()
    elif stage == 3:
        zero.checkpoint_event_prologue()  # let go of all gathered weights: they are old, and what is there is not gathered again
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        zero.checkpoint_event_epilogue()  # gather the small ones, which stay gathered between steps


def _live_weights(engine: AnyEngine) -> Iterator[tuple[str, Tensor]]:
    """(name, flat) of all weights on this rank as the forward pass finds them, without padding."""
    stage, _, rank = _sharding(engine)
    for parameter in module_of(engine).parameters():
        name = parameter.logical.name
        if stage < 3:
            yield name, parameter.detach().view(-1)
            continue
        part, whole = parameter.ds_tensor, parameter.ds_numel
        yield name, part.detach()[: max(0, whole - rank * part.ds_numel)]
        if parameter.ds_persist and parameter.ds_status.name == "AVAILABLE":
            yield f"{name} gathered", parameter.detach().view(-1)


def _scaler_state(engine: AnyEngine) -> dict[str, Any] | None:
    if isinstance(engine, PlainEngine):
        return None
    if engine.scaler is not None:
        state = engine.scaler.state_dict()
        return {"kind": "gradscaler", **{name: state[name] for name in GRADSCALER_COUNTERS}}
    dynamic = _dynamic_scaler(engine)
    return None if dynamic is None else {"kind": "dynamic", **{name: getattr(dynamic, name) for name in SCALER_COUNTERS}}


def _restore_scaler(engine: AnyEngine, kept: dict[str, Any] | None) -> None:
    """Only the state: the settings (window, hysteresis) are this run's own."""
    kind, own = (state and state["kind"] for state in (kept, _scaler_state(engine)))
    if kind != own:
        log.warning("the loss scaler starts anew: the saved run had %s, this one has %s", kind, own)
    elif kept is not None and not isinstance(engine, PlainEngine):
        if engine.scaler is not None:
            engine.scaler.load_state_dict({**engine.scaler.state_dict(), **{name: kept[name] for name in GRADSCALER_COUNTERS}})
        else:
            for name in SCALER_COUNTERS:
                setattr(_dynamic_scaler(engine), name, kept[name])


def _dynamic_scaler(engine: DeepSpeedEngine) -> Any:
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return scaler if scaler is not None and scaler.dynamic else None


def _sharding(engine: AnyEngine) -> tuple[int, int, int]:
    """(ZeRO stage, ranks that share one replica's state or hold it alike, this rank's index among them)."""
    if isinstance(engine, PlainEngine):
        return 0, 1, 0
    return engine.config.zero.stage, engine.data_ranks, dist.get_rank(engine.data_group)


def module_of(engine: AnyEngine) -> Any:
    """The model that an engine trains."""
    return engine.model if isinstance(engine, PlainEngine) else engine.engine.module


def _optimizer(engine: AnyEngine) -> Any:
    """The optimizer that the engine steps: DeepSpeed's at stages 1 to 3, else torch's."""
    return engine.optimizer


def inner_optimizer(engine: AnyEngine) -> torch.optim.Optimizer:
    """torch's optimizer, inside DeepSpeed's at stages 1 to 3."""
    return _optimizer(engine) if _sharding(engine)[0] == 0 else _optimizer(engine).optimizer


def _hash(tensor: Tensor) -> str:
    """xxh3_128 of the bytes of a flat tensor."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().cpu().view(torch.uint8).numpy().data)

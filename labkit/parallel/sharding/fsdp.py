"""ZeRO-3: parameters, gradients and optimizer state in shards; a layer is whole only while it is computed with.

    model = FSDP(model)                                      units: layers, each cut into a shard per rank
    optimizer = torch.optim.AdamW(model.parameters())        of this rank's shards
    loss = criterion(model(inputs), targets)
    loss.backward()                                          when it returns, shards have the mean gradient over ranks
    optimizer.step()

Shards are DTensors that each hold this rank's rows. They have the shape of the whole parameter, torch's clipping,
`GradScaler` and `torch.distributed.checkpoint` know them, and mixing them with ordinary tensors is an error.

With Psi bytes of parameters, each rank sends Psi (p-1)/p bytes three times per step: to gather for the forward pass, to
gather for the backward pass, and to average gradients. With `reshard_after_forward=False` whole parameters stay until
backward has used them: two times, as an all-reduce does.

Sources: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054, section 5.3 (P_os+g+p) and, for what is sent, 7.2;
Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, for units and prefetching.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.parallel.data_parallel.consistency import (
    broadcast,
    check_module,
    check_same_on_all_ranks,
    describe,
    device_of,
)
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.gather import Unit
from labkit.parallel.sharding.gradients import AveragesAtOnce
from labkit.parallel.sharding.line import Line
from labkit.parallel.sharding.rows import check_no_overlap
from labkit.parallel.sharding.schedule import Schedule, keep_dtype
from labkit.parallel.sharding.state_dicts import as_rows, consolidate
from labkit.parallel.sharding.units import Slot, Units, find_units, modules_by_unit, slots_by_unit
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import member_group

PREFIX = "module."
SHARD = "shard"  # in a state's metadata: which one it is


class FSDP(AveragesAtOnce):
    """A module whose parameters are in shards. `module` is the model; it is changed, and used through this only.

    Args:
        module: the same on all ranks but for its values, which become those of rank 0.
        compute_dtype: of parameters and floating-point inputs of units while they are computed with, and of what is
            sent; shards and their gradients keep the parameters'. BatchNorm computes in its own. None: the same.
        reduce_dtype: of gradients while they are averaged. None: the compute dtype.
        units: modules, or classes of modules, whose parameters are gathered together. None: the items of the outermost
            lists and sequences (layers), and besides these whatever has parameters. Parameters that are in no unit, or
            in several, belong to the model's own unit, which is whole from its first layer to its last.
        reshard_after_forward: give whole parameters back after a unit's forward pass, and gather them again for
            its backward pass.
        prefetch: how many units are gathered ahead, in the order of the forward pass before.
        replicate: classes of modules whose parameters every rank keeps whole, as ordinary tensors that compute in their
            dtype. torch's clipping takes no mixture of these and shards.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.all_gather`.

    Make the optimizer of `parameters()`. A parameter without a gradient on any rank gets none. All ranks must run the
    same units in the same order, forward and backward; inside of a unit they may differ. Whole parameters can be read
    only while their unit runs. Hooks on shards see the mean gradient. torch.compile leaves the wrapper's work alone.

    Raises ValueError, on all ranks of the group, if nothing is trained, for arguments that cannot work or differ
    between ranks, and for models that differ; in a forward pass, if parameters were replaced, moved or cast; in
    backward, for sparse gradients. RuntimeError where ranks run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        units: Units | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        replicate: tuple[type[nn.Module], ...] = (),
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module = module
        tensors = [*module.named_parameters(), *module.named_buffers()]
        device = next((tensor.device for _, tensor in tensors), device_of(group))
        refused: Exception | None = None
        modules: list[nn.Module] = []
        try:
            _check(module, device, (compute_dtype, reduce_dtype), prefetch)
            modules = find_units(module, units)
        except Exception as error:
            refused = error
        places = {id(each): name for name, each in module.named_modules()}
        names = [places[id(unit)] or "the model" for unit in modules]
        settings = {
            "compute_dtype, reduce_dtype": (compute_dtype, reduce_dtype),
            "units": names,
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
            "replicate": [kind.__name__ for kind in replicate],
            "transport": transport,
        }
        described = [] if refused else [describe(name, tensor) for name, tensor in tensors]
        check_same_on_all_ranks("model", settings, described, device, group, refused)
        self._group = group
        self._gathers, reductions = (Line(group, device, transport, names) for _ in range(2))
        self._units = _make_units(modules, names, members, (compute_dtype, reduce_dtype), replicate)
        self._shard_by_whole = {
            id(p): shard for unit in self._units for p, shard in zip(unit.whole, unit.shards, strict=True)
        }
        for each in module.modules():
            each.register_state_dict_post_hook(partial(_save_shards, self._shard_by_whole, self._shard))
            each.register_load_state_dict_pre_hook(_load_shards)
            if compute_dtype is not None and isinstance(each, (_BatchNorm, *replicate)):
                keep_dtype(each, compute_dtype)
        self._schedule = Schedule(
            self._units,
            self._gathers,
            reductions,
            device,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            replicated=[p for p in module.parameters() if not isinstance(p, DTensor)],
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            message = "a parameter was read outside its unit: name a unit, in units=..., around all that reads it"
            raise RuntimeError(message) from error

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that parameters are shared out over; None: all."""
        return self._group

    @property
    def transport_in_use(self) -> tuple[str, str]:
        """What carries parameters and gradients, and why it is not shared memory, if it is not."""
        return self._gathers.channel.in_use

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, at any moment."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, self._shard_by_whole.get(id(parameter), parameter)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all shards: the norm before, a scalar. A collective."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Whole parameters by the bare module's names, on every rank, in their own dtype. A collective."""
        whole = {}
        for name, parameter in self.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            whole[name.removeprefix(PREFIX)] = full.clone()
        return whole

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """The bare module's `state_dict`, on the CPU of group rank `to`, or of all (None); None on the others.

        A collective, a tensor at a time; buffers are the rank's own. It loads into the bare module, and into this one
        on any number of ranks. `torch.distributed.checkpoint` takes `module` and an optimizer of its parameters.
        """
        state: dict[str, Any] | None = consolidate(self.module.state_dict(), to in (None, dist.get_rank(self._group)))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """A `state_dict()` of this rank, or the bare module's state, of which this rank takes its rows.

        ValueError for the shard of another rank, or of another number of ranks, and for parameters of other shapes.
        """
        if assign:
            raise ValueError("expected assign=False: shards are what the optimizer has")
        for metadata in getattr(state_dict, "_metadata", {}).values():
            if (saved := metadata.get(SHARD, self._shard)) != self._shard:
                raise ValueError(f"expected the shard of {self._shard} or a whole state, got the shard of {saved}")
        names = {name.removeprefix(PREFIX): name for name in super().state_dict()}
        return super().load_state_dict({names.get(name, name): each for name, each in state_dict.items()}, strict)

    @property
    def _shard(self) -> str:
        return f"rank {dist.get_rank(self._group)} of {dist.get_world_size(self._group)}"

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("expected the module where it is to be, and in its dtype, before it is wrapped")


def _save_shards(
    shards: Mapping[int, Any],
    which: str,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
) -> None:
    """After a module has saved: shards in place of what is whole in the middle of a forward pass."""
    metadata[SHARD] = which
    for name, parameter in module._parameters.items():
        if (shard := shards.get(id(parameter))) is not None and prefix + name in state:
            state[prefix + name] = shard.detach()


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a module loads: this rank's rows of whole parameters."""
    shards: dict[str, Any] = {prefix + name: parameter for name, parameter in module._parameters.items()}
    for name, shard in shards.items():
        if isinstance(shard, DTensor) and name in state:
            state[name] = as_rows(name, state[name], shard)


def _check(module: nn.Module, device: torch.device, dtypes: Sequence[torch.dtype | None], prefetch: int) -> None:
    """ValueError for arguments that cannot work, and for parameters that cannot be sharded."""
    if any(dtype is not None and dtype not in FLOAT_TYPES for dtype in dtypes):
        raise ValueError(f"dtypes must be among {', '.join(map(str, FLOAT_TYPES))}; got {dtypes}")
    if prefetch < 0:
        raise ValueError(f"expected to prefetch 0 units or more, got {prefetch}")
    check_module(module, None)
    check_no_overlap(module.parameters())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != device:
            raise ValueError(f"expected all parameters and buffers on one device; {name} is on {tensor.device}")
    for name, p in module.named_parameters():
        reasons = {
            "sharded already": isinstance(p, DTensor),
            "not dense": p.layout is not torch.strided,
            "with hooks, which belong on parameters() after wrapping": bool(p._backward_hooks)
            or bool(getattr(p, "_post_accumulate_grad_hooks", None)),
            f"trained and {p.dtype}": p.requires_grad and p.dtype not in FLOAT_TYPES,
        }
        for reason in (reason for reason, is_so in reasons.items() if is_so):
            raise ValueError(f"expected plain parameters of real floating-point numbers; {name} is {reason}")


def _make_units(
    modules: Sequence[nn.Module],
    names: Sequence[str],
    members: dist.ProcessGroup,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
    replicate: tuple[type[nn.Module], ...],
) -> list[Unit]:
    """Units of these modules, the whole model last: with rank 0's values, then cut."""
    module = modules[-1]
    broadcast([*module.parameters(), *module.buffers()], members)
    mesh = DeviceMesh.from_group(members, next(module.parameters()).device.type)
    parts = zip(modules, names, modules_by_unit(modules), slots_by_unit(modules), strict=True)
    units: list[Unit] = []
    for unit, name, inside, slots in parts:
        sharded = [slot for slot in slots if not all(isinstance(owner, replicate) for owner, _ in slot.owners)]
        units.append(Unit(name, unit, inside, sharded, [_dtype(slot, dtypes[0]) for slot in sharded], mesh))
        units[-1].reduce_dtype = dtypes[1]
        units[-1].is_last = unit is module or any(each in modules for each in unit.modules() if each is not unit)
    return units


def _dtype(slot: Slot, compute_dtype: torch.dtype | None) -> torch.dtype:
    """That a parameter is computed with in: BatchNorm keeps its own."""
    own = slot.parameter.dtype
    keeps = not own.is_floating_point or any(isinstance(owner, _BatchNorm) for owner, _ in slot.owners)
    return own if keeps or compute_dtype is None else compute_dtype

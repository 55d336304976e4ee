"""ZeRO-3: parameters, gradients and optimizer state in shards; a layer's parameters are whole only
while it computes.

    model = FSDP(model)                                      cuts each layer into one shard per rank
    optimizer = torch.optim.AdamW(model.parameters())        updates this rank's shards
    loss = criterion(model(inputs), targets)
    loss.backward()                                          on return, shards have the mean gradient over ranks
    optimizer.step()

A shard is a DTensor: its shape is that of the whole parameter, its memory holds this rank's rows.
torch's gradient clipping, `GradScaler` and `torch.distributed.checkpoint` support DTensors; an
operation that mixes one with an ordinary tensor raises.

With Psi bytes of parameters on p ranks, each rank sends Psi (p-1)/p bytes three times per step: to
gather them for the forward pass, to gather them again for the backward pass, and to average
gradients. With `reshard_after_forward=False` parameters stay whole from forward to backward, which
saves the second gather: a rank then sends as much as in an all-reduce. With
`reshard_after_backward=False` they stay whole from step to step, and only the rows that the
optimizer has changed are gathered: this is ZeRO-2.

Sources: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054, section 5.2 (P_os+g), 5.3
(P_os+g+p) and, for the bytes sent, 7.2; Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, for
units and prefetching.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.parallel.agreement import agree_once
from labkit.parallel.data_parallel.consistency import broadcast, check_module, describe_model
from labkit.parallel.overlap import CheckedChannel
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.partition import Part, Units, find_units, partition
from labkit.parallel.sharding.scheduler import UnitScheduler, cast, run_around
from labkit.parallel.sharding.sharded import (
    SHARD,
    as_rows,
    check_shard,
    check_shardable,
    consolidate,
)
from labkit.parallel.sharding.unit import Options, Unit
from labkit.parallel.transport import AUTO, member_group

PREFIX = "module."


class FSDP(nn.Module):
    """A module whose parameters are in shards. `module` is the model: changed in place, and called
    only through this.

    Args:
        module: the model, alike on all ranks; its parameters and buffers are overwritten with rank
        0's values. compute_dtype: dtype of gathered parameters, of the messages that gather them,
        and of the floating-point inputs
            of units. Shards and their gradients keep the parameters' dtype, and BatchNorm computes
            in its own. None: the parameters' dtype.
        reduce_dtype: dtype of gradients while they are averaged. None: the compute dtype. units:
        modules, or classes of modules; each one's parameters are gathered together. None: each item
        of the
            outermost `ModuleList`s and `Sequential`s (usually a layer), and each other module with
            parameters. Parameters in no unit, or in several, belong to the unit of the model
            itself, which stays whole throughout a forward or backward pass.
        reshard_after_forward: release whole parameters after a unit's forward, and gather them
        again for its backward. reshard_after_backward: release them after backward. If not, nor
        after forward, and a unit is gathered again
            once an optimizer has stepped or torch has changed a shard of it. Shards are then views
            of whole parameters.
        prefetch: how many units are gathered ahead, in the order of the last forward pass.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.all_gather`.

    Build the optimizer from `parameters()`. If no rank has a gradient for a parameter, its `.grad`
    stays None. All ranks must run the same units in the same order, forward and backward; inside a
    unit they may differ. Whole parameters can be read only while their unit runs. Hooks on shards
    see the mean gradient. torch.compile compiles the model's code only, not the gathers.

    Raises ValueError, on all ranks of the group, if no parameter is trainable, for invalid
    arguments, and for models or arguments that differ between ranks; in a forward pass, if
    parameters were replaced, moved or cast; in backward, for sparse gradients. RuntimeError if
    ranks run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        units: Units | None = None,
        reshard_after_forward: bool = True,
        reshard_after_backward: bool = True,
        prefetch: int = 1,
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module = module
        self.group = group
        self._shard = f"rank {members.rank()} of {members.size()}"
        reshard_after_forward &= reshard_after_backward
        dtypes = (compute_dtype, reduce_dtype)
        reshard = (reshard_after_forward, reshard_after_backward)
        options = Options(*dtypes, *reshard, prefetch, transport)
        parts = list[Part]()

        def describe() -> dict[str, object]:
            _check(module, options)
            parts.extend(partition(find_units(module, units)))
            return {
                **vars(options),
                "units": [part.name for part in parts],
                **describe_model(module),
            }

        agree_once("model", describe, group)
        device = next(module.parameters()).device
        names = [part.name for part in parts]
        # or ValueError, before any change
        channel = CheckedChannel(group, device, transport, names)
        broadcast([*module.parameters(), *module.buffers()], group)
        mesh = DeviceMesh.from_group(members, device.type)
        self._units = [Unit(part, mesh, options, channel) for part in parts]
        for each in module.modules():
            each.register_state_dict_post_hook(partial(_save_shards, self._shard))
            each.register_load_state_dict_pre_hook(_load_shards)
            if compute_dtype is not None and isinstance(each, _BatchNorm):
                _compute_in_own_dtype(each, compute_dtype)
        self._scheduler = UnitScheduler(self._units, options, channel)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            message = (
                "a parameter was read outside its unit: name a unit, in units=..., around all that"
                " reads it"
            )
            raise RuntimeError(message) from error

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing, so that code for DDP runs. Every backward pass averages: no rank can keep
        whole gradients."""
        yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards, even while their unit is whole."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, getattr(parameter, "sharded_parameter", parameter)

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """Return the bare module's `state_dict`, in CPU memory, on group rank `to` (None: on all);
        None on the others.

        A collective, one tensor at a time; buffers are the rank's own. The result can be loaded
        into the bare module, or into an FSDP on any number of ranks. To
        `torch.distributed.checkpoint`, pass `module` and the optimizer.
        """
        return consolidate(self.module.state_dict(), to in (None, dist.get_rank(self.group)))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a `state_dict()` of this rank, or the bare module's state, of which this rank takes
        its rows.

        ValueError for the shard of another rank or number of ranks, and for parameters of other
        shapes.
        """
        if assign:
            raise ValueError("expected assign=False: the optimizer has the shards")
        for metadata in getattr(state_dict, "_metadata", {}).values():
            check_shard(metadata.get(SHARD, self._shard), self._shard)
        names = {name.removeprefix(PREFIX): name for name in super().state_dict()}
        return super().load_state_dict(
            {names.get(name, name): each for name, each in state_dict.items()}, strict
        )

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("expected the module to be moved and cast before it is wrapped")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a wrapper is tied to its ranks: save its state_dict()")


def _save_shards(
    label: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Hook after a module's `state_dict`: it holds shards, even in a forward pass."""
    metadata[SHARD] = label
    for name, parameter in module._parameters.items():
        shard: Any = getattr(parameter, "sharded_parameter", parameter)
        # at offset 0: torch cannot copy it at another
        if isinstance(shard, DTensor) and prefix + name in state:
            state[prefix + name] = rows = DTensor(
                shard._local_tensor.new_empty(0), shard._spec, requires_grad=False
            )
            rows._local_tensor = shard._local_tensor


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a module loads: take this rank's rows of whole parameters."""
    shards: dict[str, Any] = {
        prefix + name: parameter for name, parameter in module._parameters.items()
    }
    for name, shard in shards.items():
        if isinstance(shard, DTensor) and name in state:
            state[name] = as_rows(name, state[name], shard)


def _check(module: nn.Module, options: Options) -> None:
    """Raise ValueError for arguments that cannot work, and for parameters that cannot be
    sharded."""
    if wrong := {options.compute_dtype, options.reduce_dtype} - {None, *FLOAT_TYPES}:
        raise ValueError(f"dtypes must be among {', '.join(map(str, FLOAT_TYPES))}; got {wrong}")
    if options.prefetch < 0:
        raise ValueError(f"expected to prefetch 0 units or more, got {options.prefetch}")
    check_module(module, None)
    check_shardable(module.named_parameters(), are_averaged=True)
    if len({tensor.device for tensor in (*module.parameters(), *module.buffers())}) > 1:
        raise ValueError("expected all parameters and buffers on one device")
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"expected parameters without hooks, and {name} has some: put them on parameters()"
                " later"
            )


def _compute_in_own_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module compute in the dtype of its parameters and statistics; its outputs are cast to
    the compute dtype."""
    tensors = (*module.parameters(), *module.buffers())
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), own)
        return cast(call(*args, **kwargs), compute_dtype)

    run_around(module, run)

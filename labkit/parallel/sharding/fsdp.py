"""ZeRO-3: parameters, gradients and optimizer state in shards; layers are unsharded to compute.

    model = FSDP(model)                                  cuts each layer into one shard per rank
    optimizer = torch.optim.AdamW(model.parameters())    updates this rank's shards
    loss = criterion(model(inputs), targets)
    loss.backward()                                      gives shards the mean gradient over ranks
    optimizer.step()

A shard is a DTensor: its shape is that of the whole parameter, its memory holds this rank's rows.
torch's gradient clipping, `GradScaler` and `torch.distributed.checkpoint` support DTensors; an
operation that mixes one with an ordinary tensor raises.

With Psi bytes of parameters on p ranks, each rank sends Psi (p-1)/p bytes three times per step: in
all-gathers for the forward pass, in all-gathers for the backward pass, and in reduce-scatters of
gradients. `reshard_after_forward=False` keeps parameters in memory until backward, and saves the
second of these: a rank then sends as much as in an all-reduce. `reshard_after_backward=False` keeps
them from step to step: this is ZeRO-2.

Sources: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054, section 5.2 (P_os+g), 5.3
(P_os+g+p) and, for the bytes sent, 7.2; Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, for
units and prefetching; torch's `fully_shard` for the schedule and the names of its steps.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labkit.parallel.agreement import agree_once
from labkit.parallel.data_parallel.consistency import broadcast, describe_model
from labkit.parallel.failures import report_failure
from labkit.parallel.overlap import Channel
from labkit.parallel.sharding.checks import check_model
from labkit.parallel.sharding.hooks import cast
from labkit.parallel.sharding.partition import UnitMembers, Units, find_units, partition
from labkit.parallel.sharding.penalty import MIXED, ShardInLoss
from labkit.parallel.sharding.sharded import (
    SHARD,
    as_rows,
    check_shard,
    consolidate,
    make_mesh,
)
from labkit.parallel.sharding.state import FSDPState
from labkit.parallel.sharding.unit import Options, Unit
from labkit.parallel.transport import AUTO, member_group
from labkit.torch_private import BatchNorm

# Of names; a cut model (tensor parallelism) in this wrapper has one of its own.
PREFIXES = re.compile(r"^(module\.)+")
# What torch says in a forward pass, and what has happened.
TORCH_ERRORS = {
    MIXED: (
        "a parameter was read outside its unit: name a unit, in units=..., around all that reads it"
    ),
    "of _PostBackwardBackward is a view": (
        "a unit changes its input in place: FSDP needs the input's gradient, so clone it first"
    ),
}


class FSDP(nn.Module):
    """A module whose parameters are in shards.

    Args:
        module: the model, the same on all ranks. It is changed in place, and rank 0's values
            overwrite the others'.
        compute_dtype: dtype of unsharded parameters, of the messages that gather them, and of
            floating-point inputs of units. Shards and their gradients keep the parameters' dtype.
            BatchNorm computes in its own dtype. None: the parameters' dtype.
        reduce_dtype: dtype of gradients while they are averaged. None: the compute dtype.
        units: modules, or classes of modules; each one's parameters are communicated together.
            None: each item of the outermost `ModuleList`s and `Sequential`s (usually a layer), and
            each other module with parameters. Parameters in no unit, or in several, belong to the
            unit of the model, which stays unsharded throughout a forward or backward pass.
        reshard_after_forward: free a unit's unsharded parameters after its forward, and gather them
            again for its backward.
        reshard_after_backward: free them after backward. If not, they stay in memory after forward,
            too, and a unit is gathered again after a backward pass or a change of its shards.
        prefetch: how many units are gathered ahead, in the order of the last forward pass.
        ignored_params: parameters that stay as they are on each rank, and are not averaged.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.all_gather`.

    Build the optimizer from `parameters()`. If no rank has a gradient for a parameter, its `.grad`
    stays None. All ranks must run the same units in the same order, forward and backward. Within a
    unit they may use different parameters, of which the others add zeros. Unsharded parameters can
    be read only while their unit runs, and not written to; a write to their `data` is lost. A
    method such as `model.module.encode(x)` must be registered (`register_forward_method`). A
    penalty on shards can be added to the loss. Hooks on shards see the mean gradient. torch.compile
    compiles the model's code, not the gathers.

    After an error on one rank alone, the other ranks' pass fails, too, and so does every later one.
    To go on, load this one's `state_dict()` into a new wrapper in a new group (`dist.new_group`).

    Raises ValueError, on all ranks of the group, if no parameter is trainable, for invalid
    arguments, and for models or arguments that differ between ranks; in a forward pass, if
    parameters were added, replaced, moved or cast; in backward, for sparse gradients. RuntimeError,
    on all ranks, if they run different units: at the end of an evaluation or backward pass, or when
    a message has another unit's name.
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
        ignored_params: Iterable[nn.Parameter] = (),
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module = module
        self.group = group
        self._shard = f"rank {members.rank()} of {members.size()}"
        options = Options(
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            reshard_after_forward=reshard_after_forward and reshard_after_backward,
            reshard_after_backward=reshard_after_backward,
            prefetch=prefetch,
            transport=transport,
        )
        ignored = list(ignored_params)
        members_of_units = list[UnitMembers]()

        def check_and_describe() -> dict[str, object]:
            check_model(module, options)
            members_of_units.extend(partition(find_units(module, units), set(ignored)))
            return {
                **vars(options),
                "units": [unit.name for unit in members_of_units],
                **describe_model(module),
            }

        agree_once("model", check_and_describe, group)
        device = next(module.parameters()).device
        # ValueError for a transport that there is not, before any change
        channel = Channel(group, device, transport)
        broadcast([*module.parameters(), *module.buffers()], group)
        mesh = make_mesh(members, device.type)
        collectives = list[str]()
        self._units = [Unit(each, mesh, options, channel, collectives) for each in members_of_units]
        for each in module.modules():
            each.register_state_dict_post_hook(partial(_save_shards, self._shard))
            each.register_load_state_dict_pre_hook(_load_shards)
            if compute_dtype is not None and isinstance(each, BatchNorm):
                _compute_in_own_dtype(each, compute_dtype)
        self._state = FSDPState(self._units, options, channel, group, ignored, collectives)
        # Nothing steps before an optimizer has read the parameters.
        self._state.set_shard_class(ShardInLoss)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._state.abort_forward()  # an interrupt may have ended a call of one of its modules
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            self._state.abort_forward()
            report_failure(error, self.group)
            for text, explanation in TORCH_ERRORS.items():
                if text in str(error):
                    raise RuntimeError(explanation) from error
            raise

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode."""
        if not mode:
            # Who evaluates may call a method that is not registered; no step is slowed down.
            self._state.set_shard_class(ShardInLoss)
        return super().train(mode)

    def register_forward_method(self, name: str) -> None:
        """Let the module's method `name` run as its forward does, with unsharded parameters.

        As torch's `register_fsdp_forward_method`. ValueError if there is no such method.
        """
        method = getattr(self.module, name, None)
        if not callable(method):
            raise ValueError(f"expected a method of the module, and it has no {name!r}")
        setattr(self.module, name, partial(self._state.call_as_forward, method))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing, so that code for DDP runs: every backward pass averages."""
        yield

    @property
    def unsharded_parameters(self) -> list[nn.Parameter]:
        """Unsharded parameters; those that are not in memory have a storage of 0 bytes."""
        return [each.unsharded for unit in self._units for each in unit.parameters]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards, even while their unit is unsharded.

        Read after backward, as by `clip_grad_norm_(model.parameters(), 1.0)`, the next optimizer
        step takes some 10% longer, unless they are read under `torch.no_grad()`.
        """
        if torch.is_grad_enabled():
            # Whoever reads parameters now may add a penalty on them to the loss, which needs shards
            # that know autograd. Whether they do cannot be seen from here.
            self._state.set_shard_class(ShardInLoss)
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name, getattr(parameter, "sharded_parameter", parameter)

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """Return the bare module's `state_dict`, in CPU memory. A collective, one tensor at a time.

        Only group rank `to` gets it (None: all ranks), the others get None. Buffers are those of
        that rank. It can be loaded into the bare module, or into an FSDP on any number of ranks.
        To `torch.distributed.checkpoint`, pass `module` and the optimizer.
        """
        return consolidate(self.module.state_dict(), to in (None, dist.get_rank(self.group)))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a `state_dict()` of this rank, or its rows of the bare module's state.

        ValueError for the shard of another rank or number of ranks, and for parameters of other
        shapes.
        """
        if assign:
            raise ValueError("expected assign=False: the optimizer has the shards")
        for metadata in getattr(state_dict, "_metadata", {}).values():
            check_shard(metadata.get(SHARD, self._shard), self._shard)
        names = {PREFIXES.sub("", name): name for name in super().state_dict()}
        names |= {name.removeprefix("module."): name for name in super().state_dict()}
        state = {names.get(name, name): value for name, value in state_dict.items()}
        return super().load_state_dict(state, strict)

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
        if isinstance(shard, DTensor) and prefix + name in state:
            # torch's copies of DTensors expect them at the start of their memory.
            rows = DTensor(shard._local_tensor.new_empty(0), shard._spec, requires_grad=False)
            rows._local_tensor = shard._local_tensor
            state[prefix + name] = rows


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Hook before a module loads: take this rank's rows of whole parameters."""
    for name, parameter in list(module._parameters.items()):
        shard: Any = getattr(parameter, "sharded_parameter", parameter)
        if isinstance(shard, DTensor) and prefix + name in state:
            # An interrupted pass leaves unsharded parameters, which would take the values.
            module._parameters[name] = shard  # type: ignore[assignment]
            state[prefix + name] = as_rows(prefix + name, state[prefix + name], shard)


def _compute_in_own_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module compute in the dtype of its parameters; cast outputs to the compute dtype."""
    tensors = (*module.parameters(), *module.buffers())
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)

    def to_own(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast((args, kwargs), own)

    def to_compute(_: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, compute_dtype)

    module.register_forward_pre_hook(to_own, with_kwargs=True)
    module.register_forward_hook(to_compute)

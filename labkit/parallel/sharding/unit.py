"""A unit of FSDP: modules whose parameters are gathered, whole and released at the same time, and
averaged together.

    shard    for the optimizer: this rank's rows, in the parameter's dtype; always there
    whole    for the modules: the parameter in the compute dtype, in memory from `start_gather` to `release`

Autograd saves `whole`, or views of it, for the backward pass. Its memory is released and gathered
again in between, which autograd does not notice. To read released memory is an error: `release`
raises the version counter, as a change in place would, and `start_gather` resets it.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from labkit.parallel.collectives import all_reduce
from labkit.parallel.overlap import CheckedChannel, Wait
from labkit.parallel.sharding.gather import (
    average_rows,
    own_rows,
    plan_gather,
    row_strides,
    with_strides,
)
from labkit.parallel.sharding.partition import Part, Slot
from labkit.parallel.sharding.sharded import Sharded, as_gradient, shard_parameter
from labkit.parallel.transport import Transport

# an operator, which the allocation ledger sees
_resize = torch.ops.inductor.resize_storage_bytes_.default


@dataclass(frozen=True)
class Options:
    """Arguments of FSDP, the same on all ranks."""

    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    reshard_after_backward: bool
    prefetch: int
    transport: str


class Token:
    """A call of a unit, or an input whose gradient frozen parameters wait for. It goes with its
    graph."""


class UnitParameter:
    """A parameter, as `shard` and as `whole`, and its gradient in one backward pass."""

    def __init__(
        self, slot: Slot, mesh: DeviceMesh, compute_dtype: torch.dtype | None, *, is_view: bool
    ):
        """`is_view`: the shard is a view of `whole`, if it has the same dtype."""
        value = slot.parameter.detach()
        rank = mesh.get_local_rank()
        p = mesh.size()
        keeps_dtype = not value.is_floating_point() or any(
            isinstance(owner, _BatchNorm) for owner, _ in slot.owners
        )
        dtype = value.dtype if keeps_dtype or compute_dtype is None else compute_dtype
        self.name = slot.name
        self.owners = slot.owners
        self.strides = row_strides(value)
        self.place = torch.empty_strided(
            value.shape, self.strides, dtype=dtype, device=value.device
        )
        """Where rows are gathered: the memory of `whole`, which has a version counter of its
        own."""
        self.own_place = own_rows(self.place, rank, p)
        rows = own_rows(value, rank, p)
        self._owns_rows = not is_view or dtype != value.dtype
        """The shard has memory of its own."""
        self._rank_of_size = (rank, p)
        rows = rows.clone() if self._owns_rows else own_rows(self.place.data, rank, p).copy_(rows)
        self.shard = shard_parameter(slot.parameter, rows, mesh)
        self.whole = nn.Parameter(self.place.data, value.is_floating_point() or value.is_complex())
        self.whole.__dict__.update(self.shard.__dict__, sharded_parameter=self.shard)
        self.is_used = False
        """It got a gradient in this pass; at the end of the pass: on any rank."""
        self.means: list[Tensor] = []
        """Averaged rows of this pass."""

    def sync_with_shard(self) -> None:
        """Freeze or thaw `whole` as the user did the shard; ValueError for one that was replaced,
        moved or cast."""
        if any(module._parameters.get(name) is not self.shard for module, name in self.owners):
            raise ValueError(
                f"{self.name} was replaced or removed: change the model before wrapping it"
            )
        if type(self.shard) is not Sharded:
            raise ValueError(
                f"{self.name} was moved or cast: move and cast the model before wrapping it"
            )
        if self.whole.requires_grad != self.shard.requires_grad:
            self.whole.requires_grad_(self.shard.requires_grad)

    def leave_old_rows(self) -> bool:
        """Take new memory once the user has put other rows under the shard: the old ones may be
        swapped in again."""
        if self._owns_rows or self.shard._local_tensor.data_ptr() == self.own_place.data_ptr():
            return False
        with torch.inference_mode(False):  # it stays
            self._owns_rows, self.place = True, self.place.clone()
            self.own_place = own_rows(self.place, *self._rank_of_size)
            self.whole.data = self.place.data
        return True

    def take_gradient(self, dtype: torch.dtype | None) -> Tensor:
        """Return the whole gradient, zeros if there is none, and drop it. None: in its own
        dtype."""
        gradient = self.whole.grad
        self.whole.grad = None
        dtype = dtype or self.place.dtype
        if gradient is None:
            return torch.empty_strided(
                self.place.shape, self.strides, dtype=dtype, device=self.place.device
            ).zero_()
        self.is_used = True
        return with_strides(gradient.detach().to(dtype), self.strides)

    def add_mean(self, gradient: Tensor) -> Tensor:
        """Allocate and return the average of this rank's rows of a gradient; a scalar's value, to
        be all-reduced."""
        rows = own_rows(gradient, *self._rank_of_size)
        self.means.append(torch.empty_like(rows) if rows.dim() else rows.clone())
        return self.means[-1]

    def assign_means(self) -> None:
        """Accumulate as autograd does, which never reaches a shard: this runs the hooks that users
        put on it."""
        shard = self.shard
        for mean in self.means if self.is_used else ():
            gradient = as_gradient(mean.to(shard.dtype), shard)
            for hook in (shard._backward_hooks or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
            for hook in (shard._post_accumulate_grad_hooks or {}).values():
                if hook(shard) is not None:  # as torch does
                    raise RuntimeError("post accumulate grad hooks should return None")


class Unit:
    """Modules whose parameters are whole at the same time."""

    def __init__(
        self, part: Part, mesh: DeviceMesh, options: Options, channel: CheckedChannel
    ) -> None:
        """Cut parameters into shards, and put these into the modules."""
        self.name = part.name
        self.module = part.module
        self.modules = part.modules
        self.ends_with_pass = part.ends_with_pass
        self._reduce_dtype = options.reduce_dtype
        self._keeps_memory = not options.reshard_after_backward
        self._channel = channel
        self.parameters = [
            UnitParameter(slot, mesh, options.compute_dtype, is_view=self._keeps_memory)
            for slot in part.slots
        ]
        self.is_whole = True
        """Gathered, or being gathered."""
        self.is_attached = True
        """The modules have the whole parameters."""
        self._wait: Wait | None = None
        self._receive_rows = self._plan_gather()
        self.gathered_versions: list[tuple[int, ...]] = []
        """Versions of the shards at the last gather."""
        self.calls_in_progress = 0
        """Forward passes of its module."""
        self.trained: list[UnitParameter] = []
        self.ready: set[UnitParameter] = set()
        """Parameters whose gradient is complete."""
        self.is_averaged = False
        self.inputs: weakref.WeakSet[Token] = weakref.WeakSet()
        self.release()

    # Parameters

    def sync_with_shards(self) -> None:
        """Freeze and thaw whole parameters as the user did the shards. ValueError for replaced
        ones."""
        for parameter in self.parameters:
            parameter.sync_with_shard()
        self.trained = [parameter for parameter in self.parameters if parameter.shard.requires_grad]

    def attach(self, *, whole: bool) -> None:
        """Put whole parameters, or shards, into the modules."""
        if whole != self.is_attached:
            self.is_attached = whole
            for parameter in self.parameters:
                for module, name in parameter.owners:
                    module._parameters[name] = parameter.whole if whole else parameter.shard

    def current_versions(self) -> list[tuple[int, ...]]:
        """Return versions and memory of each shard and its rows. A shard counts its new rows
        (`Sharded.data`)."""
        pairs = [(parameter.shard, parameter.shard._local_tensor) for parameter in self.parameters]
        return [
            (shard._version, rows._version, rows.untyped_storage()._cdata) for shard, rows in pairs
        ]

    def make_whole(self) -> None:
        """Gather the parameters, unless they are whole. A collective."""
        self.start_gather()
        self.finish_gather()

    def start_gather(self) -> None:
        """Allocate whole parameters, and start to gather their rows, unless they are whole. A
        collective."""
        if self.is_whole:
            return
        self.is_whole, self.gathered_versions = True, self.current_versions()
        moved = [parameter.leave_old_rows() for parameter in self.parameters]
        if any(moved):
            self._receive_rows = self._plan_gather()
        if whole := tuple(parameter.whole for parameter in self.parameters):
            for parameter in self.parameters if not self._keeps_memory else ():
                _resize(parameter.place, parameter.place.nbytes)
            torch._C._autograd._unsafe_set_version_counter(whole, (0,) * len(whole))
            self._wait = self._channel.start_checked(self.name, self._gather_rows)

    def _plan_gather(self) -> Callable[[], None]:
        """Return a function that receives the other ranks' rows, once this rank's are in their
        places."""
        with torch.inference_mode(False):  # its vectors stay
            return plan_gather(
                [parameter.place for parameter in self.parameters], self._channel.transport
            )

    def _gather_rows(self) -> None:
        pairs = [
            (parameter.own_place, parameter.shard._local_tensor) for parameter in self.parameters
        ]
        if elsewhere := [
            (place, rows) for place, rows in pairs if place.data_ptr() != rows.data_ptr()
        ]:
            torch._foreach_copy_([place for place, _ in elsewhere], [rows for _, rows in elsewhere])
        self._receive_rows()

    def finish_gather(self) -> None:
        """Wait for a gather in flight. What a failed one leaves in memory is not the parameters,
        and is released."""
        if self._wait is None:
            return
        try:
            self._wait()
        except Exception:
            self._wait = None
            self.is_whole = False
            self._free()
            raise
        self._wait = None

    def release(self) -> None:
        """Put shards into the modules, and release whole parameters, or keep them until a shard
        changes."""
        self.attach(whole=False)
        if self.is_whole:
            self.finish_gather()
            self.is_whole = self._keeps_memory and self.gathered_versions == self.current_versions()
            self._free()

    def _free(self) -> None:
        """Release the memory of whole parameters, unless it is kept."""
        if self.parameters and not self._keeps_memory:
            for parameter in self.parameters:
                _resize(parameter.place, 0)
            torch.autograd.graph.increment_version(
                [parameter.whole for parameter in self.parameters]
            )

    # Gradients

    @property
    def has_frozen(self) -> bool:
        return len(self.trained) < len(self.parameters)

    def is_over(self, reached: set[Token]) -> bool:
        """Return whether backward needs none of its parameters: a gradient is complete after all
        uses of one."""
        is_complete = len(self.ready) == len(self.trained) and not self.calls_in_progress
        return is_complete and (
            not self.has_frozen or (bool(self.inputs) and self.inputs <= reached)
        )

    @property
    def has_gradients(self) -> bool:
        """Return whether it has gradients that are not averaged yet."""
        return any(parameter.whole.grad is not None for parameter in self.trained)

    def start_average(self) -> Wait:
        """Start to average gradients, and drop the whole ones. A collective."""
        self.is_averaged = True
        gradients = [parameter.take_gradient(self._reduce_dtype) for parameter in self.trained]
        # Allocated here, not in the channel's thread, whose memory no profiler counts.
        pairs = [
            (gradient, each.add_mean(gradient))
            for each, gradient in zip(self.trained, gradients, strict=True)
        ]
        return self._channel.start_checked(
            self.name, partial(_average, self._channel.transport, pairs), len(pairs)
        )

    def reset_pass(self) -> None:
        """Forget a backward pass."""
        for parameter in self.parameters:
            parameter.is_used = False
            parameter.means = []
        self.is_averaged = False
        self.ready.clear()


def _note_step(optimizer: Optimizer, *_: object) -> None:
    """Raise the versions of stepped shards: torch's `fused=True` does not."""
    shards = [p for group in optimizer.param_groups for p in group["params"] if type(p) is Sharded]
    torch.autograd.graph.increment_version([p._local_tensor for p in shards if p.grad is not None])


register_optimizer_step_post_hook(_note_step)


def _average(transport: Transport, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Average gradients into the second of each pair."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient, mean in gradients:
        if gradient.dim():
            by_dtype.setdefault(gradient.dtype, []).append((gradient, mean))
        else:
            all_reduce(mean, transport=transport)
    for alike in by_dtype.values():
        whole, means = zip(*alike, strict=True)
        average_rows(whole, means, transport)

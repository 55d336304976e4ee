"""A unit of FSDP, as `FSDPParamGroup` of torch's FSDP2: parameters that are communicated together.

    sharded      for the optimizer: a DTensor of this rank's rows, in the parameter's dtype
    unsharded    for the modules: all rows in the compute dtype, in memory while the unit needs it

`FSDPState` calls the steps of a unit in this order; each is a collective, or waits for one:

    forward     unshard, wait_for_unshard, reshard
    backward    unshard, wait_for_unshard, post_backward, finalize_backward, reset_backward

Autograd saves the unsharded parameter, or views of it, for the backward pass. Its memory is freed
and filled again in between, which autograd does not notice. Reading freed memory is an error:
`reshard` raises the version counter, as a change in place would, and `unshard` resets it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from labkit.parallel.overlap import Channel, Wait
from labkit.parallel.sharding.gather import local_rows, plan_all_gather, reduce_scatter_rows
from labkit.parallel.sharding.parameter import UnitParameter
from labkit.parallel.sharding.partition import UnitMembers
from labkit.torch_private import foreach_copy_, set_version_counters

# An operator, which the allocation ledger sees.
_resize_storage = torch.ops.inductor.resize_storage_bytes_.default


@dataclass(frozen=True)
class Options:
    """Arguments of FSDP, the same on all ranks."""

    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    reshard_after_backward: bool
    prefetch: int
    transport: str


class Unit:
    """Modules whose parameters are unsharded at the same time."""

    def __init__(
        self,
        members: UnitMembers,
        mesh: DeviceMesh,
        options: Options,
        channel: Channel,
        collectives: list[str],
    ) -> None:
        """Replace the modules' parameters by shards.

        `collectives`: of all units, in the order in which they start; a unit adds its own.
        """
        self.name = members.name
        self.module = members.module
        self.modules = members.modules
        self.shares_with_model = members.shares_with_model
        self._options = options
        self._channel = channel
        self._collectives = collectives
        self.parameters = [
            UnitParameter(managed, mesh, options.compute_dtype) for managed in members.parameters
        ]
        # Those that were to be trained when the last pass began, forward or backward.
        self.trained = self.parameters
        # The modules have the unsharded parameters.
        self.is_unsharded = False
        # The memory of the unsharded parameters is filled, or being filled.
        self._is_filled = False
        self._all_gather_in_flight: Wait | None = None
        # Versions of the shards that were gathered last.
        self._gathered_versions: list[tuple[int, ...]] = []
        # Shards had gradients since the last all-gather: an optimizer may have changed them.
        self._may_step = False
        self._reduce_scatters: list[Wait] = []
        # Nodes of autograd that made its inputs, while its modules run.
        self.nodes_before: set[Any] = set()
        outputs = [parameter.all_gather_output for parameter in self.parameters]
        with torch.inference_mode(False):  # its buffers stay
            self._all_gather = plan_all_gather(self.name, outputs, channel.transport)
        self._to_sharded()
        self._free_unsharded()

    # Parameters

    def unshard(self) -> None:
        """Start to all-gather the parameters, unless they are in memory. A collective."""
        if self._is_filled or not self.parameters:
            return
        self._is_filled = True
        self._gathered_versions = self.shard_versions()
        self._may_step = any(parameter.sharded.grad is not None for parameter in self.parameters)
        for parameter in self.parameters:
            _resize_storage(parameter.all_gather_output, parameter.all_gather_output.nbytes)
        unsharded = tuple(parameter.unsharded for parameter in self.parameters)
        # As before it was freed: autograd then takes what it saved for unchanged.
        set_version_counters(unsharded, (0,) * len(unsharded))
        self._collectives.append(f"all-gather of {self.name}")
        self._all_gather_in_flight = self._channel.start(self._copy_in_and_all_gather)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, and give the modules the unsharded parameters."""
        self._wait_for_all_gather()
        if not self.is_unsharded:
            self._to_unsharded()

    def reshard(self, *, keep_memory: bool = False) -> None:
        """Give the modules their shards; free the unsharded parameters unless `keep_memory`.

        Waits for an all-gather in flight.
        """
        if self.is_unsharded:
            self._to_sharded()
        # The messages of one that was prefetched, and not used, are written to the memory.
        self._wait_for_all_gather()
        if self._is_filled and not keep_memory:
            self._free_unsharded()

    def gather_again(self) -> None:
        """Let the next `unshard` gather, into the same memory: shards have changed on a rank."""
        self._is_filled = False

    def set_requires_grad_if_needed(self) -> None:
        """Freeze and thaw the unsharded parameters as the user did the shards; note the trained."""
        for parameter in self.parameters:
            requires_grad = parameter.sharded.requires_grad
            if parameter.unsharded.requires_grad != requires_grad:
                parameter.unsharded.requires_grad_(requires_grad)
        self.trained = [each for each in self.parameters if each.sharded.requires_grad]

    def shard_versions(self) -> list[tuple[int, ...]]:
        """Return what changes when torch writes to a shard, or a user puts other rows under it.

        A DTensor counts operators on itself; its rows count what is done to them directly.
        Optimizers with `foreach` or `fused` raise neither.
        """
        pairs = [(each.sharded, each.sharded._local_tensor) for each in self.parameters]
        return [
            (sharded._version, rows._version, rows.untyped_storage()._cdata)
            for sharded, rows in pairs
        ]

    @property
    def is_stale(self) -> bool:
        """Whether it has unsharded parameters in memory that may differ from the shards."""
        if not self._is_filled:
            return False
        has_gradients = any(parameter.sharded.grad is not None for parameter in self.parameters)
        is_changed = self.shard_versions() != self._gathered_versions
        if self._may_step or has_gradients or is_changed:
            return True
        # Last, since it waits for a GPU: torch's foreach operators raise no version.
        with torch.no_grad():
            return not all(
                torch.equal(
                    parameter.all_gather_input,
                    parameter.sharded._local_tensor.to(parameter.all_gather_output.dtype),
                )
                for parameter in self.parameters
            )

    def check_unsharded(self) -> None:
        """Raise RuntimeError if an unsharded parameter was changed: its shard would not be."""
        for parameter in self.parameters:
            if parameter.unsharded._version:
                raise RuntimeError(
                    f"{parameter.name} was changed in place in a forward pass: change parameters()"
                    " between passes"
                )

    def _copy_in_and_all_gather(self) -> None:
        foreach_copy_(
            [parameter.all_gather_input for parameter in self.parameters],
            [parameter.sharded._local_tensor for parameter in self.parameters],
        )
        self._all_gather()

    def _wait_for_all_gather(self) -> None:
        if self._all_gather_in_flight is None:
            return
        wait = self._all_gather_in_flight
        self._all_gather_in_flight = None
        try:
            wait()
        except Exception:
            self._free_unsharded()  # what a failed one leaves is not the parameters
            raise

    def _to_unsharded(self) -> None:
        self.is_unsharded = True
        for parameter in self.parameters:
            parameter.set_on_modules(parameter.unsharded)

    def _to_sharded(self) -> None:
        self.is_unsharded = False
        for parameter in self.parameters:
            parameter.set_on_modules(parameter.sharded)

    def _free_unsharded(self) -> None:
        self._is_filled = False
        if self.parameters:
            for parameter in self.parameters:
                _resize_storage(parameter.all_gather_output, 0)
            torch.autograd.graph.increment_version(
                [parameter.unsharded for parameter in self.parameters]
            )

    # Gradients

    @property
    def has_unreduced_gradients(self) -> bool:
        return any(parameter.unsharded.grad is not None for parameter in self.parameters)

    @property
    def sparse_gradients(self) -> list[str]:
        """Names of the parameters that got a sparse gradient in this backward pass."""
        return [
            parameter.name
            for parameter in self.parameters
            if parameter.has_sparse_gradient
            or getattr(parameter.unsharded.grad, "layout", torch.strided) is not torch.strided
        ]

    def post_backward(self) -> None:
        """Reshard, and start to reduce-scatter the gradients. A collective."""
        with torch.no_grad():
            gradients = [each.take_gradient(self._options.reduce_dtype) for each in self.trained]
            # Now, and not after the reduce-scatter: whole gradients take as much memory again.
            self.reshard(keep_memory=not self._options.reshard_after_backward)
            if not gradients:
                return
            # Allocated here, and not in the channel's thread, whose memory no profiler counts.
            for parameter, gradient in zip(self.trained, gradients, strict=True):
                rows = local_rows(gradient, parameter.rank, parameter.world_size)
                # An all-reduce averages a scalar in place.
                parameter.reduced.append(torch.empty_like(rows) if rows.dim() else rows.clone())
            pairs = [
                (gradient, parameter.reduced[-1])
                for parameter, gradient in zip(self.trained, gradients, strict=True)
            ]
            self._collectives.append(f"reduce-scatter of {self.name}")
            self._reduce_scatters.append(
                self._channel.start(
                    partial(reduce_scatter_rows, self.name, pairs, self._channel.transport),
                    reads=gradients,
                )
            )

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the reduce-scatters in flight."""
        waits = self._reduce_scatters
        self._reduce_scatters = []
        for wait in waits:
            wait()

    def finalize_backward(self, used: list[bool]) -> None:
        """Give shards their mean gradients, those of parameters that any rank has `used`."""
        self.wait_for_reduce_scatter()
        self._may_step |= any(used)
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if is_used:
                parameter.accumulate_reduced()

    def reset_backward(self) -> None:
        """Forget a backward pass, and what an interrupted one left; reshard."""
        try:
            self.wait_for_reduce_scatter()
        finally:
            for parameter in self.parameters:
                parameter.unsharded.grad = None
                parameter.has_gradient = False
                parameter.has_sparse_gradient = False
                parameter.reduced = []
            self.reshard(keep_memory=not self._options.reshard_after_backward)

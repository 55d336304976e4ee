"""A parameter of FSDP, as `FSDPParam` of torch's FSDP2: sharded, unsharded, and their gradients."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.parallel.sharding.gather import local_rows, row_strides, with_strides
from labkit.parallel.sharding.partition import ManagedParameter
from labkit.parallel.sharding.sharded import accumulate_gradient, shard_parameter
from labkit.torch_private import BatchNorm


class UnitParameter:
    """A parameter, sharded and unsharded."""

    def __init__(
        self, managed: ManagedParameter, mesh: DeviceMesh, compute_dtype: torch.dtype | None
    ) -> None:
        value = managed.parameter.detach()
        # BatchNorm computes in its own dtype, and integers have no other.
        keeps_dtype = not value.is_floating_point() or any(
            isinstance(owner, BatchNorm) for owner, _ in managed.owners
        )
        dtype = value.dtype
        if compute_dtype is not None and not keeps_dtype:
            dtype = compute_dtype
        self.name = managed.name
        self.owners = managed.owners
        self.rank = mesh.get_local_rank()
        self.world_size = mesh.size()
        self.strides = row_strides(value)
        # The memory of `unsharded`, with a version counter of its own: messages raise it.
        self.all_gather_output = torch.empty_strided(
            value.shape, self.strides, dtype=dtype, device=value.device
        )
        # A copy, since a view would keep the whole parameter in memory.
        rows = local_rows(value, self.rank, self.world_size).clone()
        self.sharded = shard_parameter(managed.parameter, rows, mesh)
        self.unsharded = nn.Parameter(
            self.all_gather_output.data, value.is_floating_point() or value.is_complex()
        )
        # The attributes of the user's parameter, and where state dicts find its shard.
        self.unsharded.__dict__.update(self.sharded.__dict__, sharded_parameter=self.sharded)
        # It got a gradient in this backward pass.
        self.has_gradient = False
        self.has_sparse_gradient = False
        # This rank's rows of the mean gradient, once per reduce-scatter of this backward pass.
        self.reduced: list[Tensor] = []

    @property
    def all_gather_input(self) -> Tensor:
        """This rank's rows in the memory of `unsharded`."""
        return local_rows(self.all_gather_output, self.rank, self.world_size)

    def set_on_modules(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = parameter

    def take_gradient(self, dtype: torch.dtype | None) -> Tensor:
        """Remove and return the unsharded gradient; zeros if there is none, or a sparse one."""
        gradient = self.unsharded.grad
        self.unsharded.grad = None
        dtype = dtype or self.all_gather_output.dtype
        if gradient is not None and gradient.layout is not torch.strided:
            # An error here would leave the other ranks waiting: the end of the pass refuses it.
            self.has_sparse_gradient = True
            gradient = None
        if gradient is None:
            # Another rank may have a gradient, and every rank takes part in the reduce-scatter.
            whole = self.all_gather_output
            zeros = torch.empty_strided(whole.shape, self.strides, dtype=dtype, device=whole.device)
            return zeros.zero_()
        self.has_gradient = True
        return with_strides(gradient.detach().as_subclass(Tensor).to(dtype), self.strides)

    def accumulate_reduced(self) -> None:
        """Add the mean gradient of this backward pass to the shard's `grad`."""
        if not self.reduced:
            return
        total, *others = [rows.to(self.sharded.dtype) for rows in self.reduced]
        for rows in others:
            total.add_(rows)
        # Once, even if the unit was called twice: hooks on the shard see the whole gradient.
        accumulate_gradient(self.sharded, total)

"""ZeRO-2: gradients averaged by reduce-scatter. Each rank gets, and keeps, the mean of its rows only.

    model = ReduceScatterDDP(model)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss.backward()             `p.grad` becomes a DTensor of this rank's rows of the mean gradient
    optimizer.step()            each rank updates its rows, then all gather all rows

With Psi bytes of parameters, each rank sends 2 Psi (p-1)/p bytes per step, as in an all-reduce of the gradients: the
first half averages gradients, the second moves updated parameters. A whole gradient lives until its bucket is averaged.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2 (P_os+g) and 7.2.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from labkit.parallel.background_comm import CheckedChannel
from labkit.parallel.data_parallel.consistency import broadcast, check_module, check_replicas
from labkit.parallel.data_parallel.wrappers import assign_buckets
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.gradients import Bucket, GradientPass
from labkit.parallel.sharding.rows import check_shardable, shard_parameter
from labkit.parallel.transport import AUTO, member_group


class ReduceScatterDDP(nn.Module):
    """One reduce-scatter per bucket, started with the bucket's last gradient. For a `ShardedOptimizer`.

    Args:
        module: the same on all ranks except for its values, which become rank 0's. Parameters may be unused in a pass.
        bucket_mb, first_bucket_mb: MiB of gradients that fill a bucket, or the first one.
        broadcast_buffers: before each forward pass in training, buffers become rank 0's.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.reduce_scatter`.

    A gradient has the shape of its parameter: torch's clipping and `GradScaler` see all of it. A parameter without a
    gradient on any rank gets none. ValueError, on all ranks, for invalid arguments and for models that differ; in a
    forward pass, for new or removed parameters, and for hooks that would run before the average.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        broadcast_buffers: bool = True,
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module, self.group, self._broadcasts = module, group, broadcast_buffers
        settings = {"buckets": (bucket_mb, first_bucket_mb), "broadcast": broadcast_buffers, "transport": transport}
        refusal: Exception | None = None
        try:
            if not min(bucket_mb, first_bucket_mb) > 0:
                raise ValueError(f"expected bucket sizes above 0 MB, got {bucket_mb} and {first_bucket_mb}")
            check_module(module, None)
            check_shardable(module.named_parameters(), are_averaged=True)
        except Exception as error:
            refusal = error
        check_replicas(module, settings, group, refusal)
        broadcast([*module.parameters(), *module.buffers()], group)
        self._parameters_in_model = list(module.parameters())
        averaged = [p for p in reversed(self._parameters_in_model) if p.dtype in FLOAT_TYPES]
        device = averaged[0].device
        mesh = DeviceMesh.from_group(members, device.type)
        self._buckets: list[Bucket] = []
        for is_trained in (True, False):
            alike = [p for p in averaged if p.requires_grad is is_trained]
            for indices in assign_buckets(alike, bucket_mb, first_bucket_mb):
                whole = [alike[index] for index in indices]
                shards = [shard_parameter(p, mesh, copy=False) for p in whole]
                self._buckets.append(Bucket(f"bucket {len(self._buckets)}", whole, shards, whole))
        names = [bucket.name for bucket in self._buckets]
        control, channel = (CheckedChannel(group, device, transport, names) for _ in range(2))
        self._pass = GradientPass(self._buckets, control, channel)
        self._hooked: set[nn.Parameter] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @disable_compile
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled() or self._pass.is_running:
            return
        self._pass.abandon_unfinished()
        if [*map(id, self._parameters_in_model)] != [*map(id, self.module.parameters())]:
            raise ValueError("parameters were added, replaced or removed: change the model before wrapping it")
        for bucket in self._buckets:
            for p in bucket.whole:
                self._hook(p, bucket)
        if self._broadcasts:
            broadcast(self.module.buffers(), self.group)

    def _hook(self, p: Any, bucket: Bucket) -> None:
        if p.requires_grad and p not in self._hooked:
            self._hooked.add(p)
            p.register_hook(self._pass.hook(self._pass.begin))  # before autograd adds to rows of earlier passes
            p.register_post_accumulate_grad_hook(self._pass.hook(self._pass.note_gradient, bucket))
        if len(p._post_accumulate_grad_hooks or ()) > 1:
            raise ValueError("hooks after a gradient's accumulation would run before its average: remove them")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accept code that accumulates gradients with DDP. Gradients are averaged all the same: none stay whole."""
        yield

    def __getstate__(self) -> NoReturn:
        raise TypeError("a wrapper is tied to its ranks: save the state_dict() of its `module`")

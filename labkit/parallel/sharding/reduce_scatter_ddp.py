"""ZeRO-2: gradients averaged by reduce-scatter, so that each rank gets, and keeps, the mean of its rows only.

    model = ReduceScatterDDP(model)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss.backward()             `p.grad` is a DTensor of this rank's rows of the mean gradient
    optimizer.step()            each rank updates its rows, then all get all of them

With Psi bytes of parameters, each rank sends 2 Psi (p-1)/p bytes a step, as an all-reduce of the gradients does:
here they are averaged by the first half of one, and the second half moves updated parameters. A whole gradient lives
until it has been put into its bucket.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2 (P_os+g) and 7.2.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labkit.parallel.data_parallel.consistency import broadcast, check_module, check_replicas
from labkit.parallel.data_parallel.wrappers import assign_buckets
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.gradients import AveragesAtOnce, Bucket, GradientPass
from labkit.parallel.sharding.line import Line
from labkit.parallel.sharding.rows import shard_parameter
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import member_group


class ReduceScatterDDP(AveragesAtOnce):
    """One reduce-scatter per bucket, begun as soon as the bucket's last gradient is there. For a `ShardedOptimizer`.

    Args:
        module: the same on all ranks but for its values, which become those of rank 0.
        bucket_mb, first_bucket_mb: a bucket, or the first one, is full from so many MiB of gradients up.
        broadcast_buffers: before each forward pass that is trained, buffers become those of rank 0.
        find_unused: for code written for other wrappers; here parameters may be unused in any pass.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.reduce_scatter`.

    A gradient has the shape of its parameter and knows where its rows are: torch's clipping and `GradScaler` see all of
    it. A parameter without a gradient on any rank gets none. ValueError, on all ranks, for arguments and models that
    cannot work or differ; in a forward pass, for parameters that came or went since, and for hooks too early for means.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        broadcast_buffers: bool = True,
        find_unused: bool = True,
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module, self.group, self._broadcasts = module, group, broadcast_buffers
        settings = {"buckets": (bucket_mb, first_bucket_mb), "broadcast": broadcast_buffers, "transport": transport}
        refused = ValueError("expected bucket sizes above 0 MB") if min(bucket_mb, first_bucket_mb) <= 0 else None
        check_replicas(module, settings, group, refused or _unsuitable(module))
        broadcast([*module.parameters(), *module.buffers()], group)
        self._in_model = list(module.parameters())
        parameters = [p for p in reversed(self._in_model) if p.dtype in FLOAT_TYPES]
        device = parameters[0].device
        mesh = DeviceMesh.from_group(members, device.type)
        trained, frozen = ([p for p in parameters if p.requires_grad is is_trained] for is_trained in (True, False))
        kinds = (trained, frozen)
        filled = [
            [kind[i] for i in each] for kind in kinds for each in assign_buckets(kind, bucket_mb, first_bucket_mb)
        ]
        self._buckets = []
        for number, bucket in enumerate(filled):
            shards = [shard_parameter(p, mesh, copy=False) for p in bucket]
            self._buckets.append(Bucket(f"bucket {number}", bucket, shards, bucket))
        places = [bucket.place for bucket in self._buckets]
        control, line = (Line(group, device, transport, places) for _ in range(2))
        self._pass = GradientPass(self._buckets, control, line, device)
        self._hooked: set[nn.Parameter] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @disable_compile
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled() or self._pass.is_running:
            return
        self._pass.leave_unfinished()
        if [*map(id, self._in_model)] != [*map(id, self.module.parameters())]:
            raise ValueError("parameters were added, replaced or removed: change the model before wrapping it")
        for bucket in self._buckets:
            for p in bucket.whole:
                self._hook(p, bucket)
        if self._broadcasts and (buffers := list(self.module.buffers())):
            broadcast(buffers, self.group)

    def _hook(self, p: Any, bucket: Bucket) -> None:
        if p.requires_grad and p not in self._hooked:
            self._hooked.add(p)
            p.register_hook(self._pass.hook(self._pass.begin))  # before autograd adds to rows of earlier passes
            p.register_post_accumulate_grad_hook(self._pass.hook(self._pass.note_gradient, bucket))
        if len(p._post_accumulate_grad_hooks or ()) > 1:
            raise ValueError("hooks after a gradient's accumulation would run before it is averaged: remove them")


def _unsuitable(module: nn.Module) -> Exception | None:
    try:
        check_module(module, None)
    except ValueError as error:
        return error
    for name, p in module.named_parameters():
        if isinstance(p, DTensor) or p.layout is not torch.strided:
            return ValueError(f"expected parameters that are whole and dense; {name} is not")
        if p.requires_grad and p.dtype not in FLOAT_TYPES:
            return ValueError(f"labkit adds real floating-point numbers only; {name} is trained and {p.dtype}")
    return None

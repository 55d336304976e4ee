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

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from labkit.parallel.backward_pass import BackwardPass
from labkit.parallel.data_parallel.consistency import broadcast, check_module, check_replicas
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.gradients import Averager, Bucket, Line
from labkit.parallel.sharding.layout import Layout, shard_parameter
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import member_group

MIB = 2**20
HOOKS = ("_put_rows_aside", "_gradient_ready")  # before and after autograd adds a gradient


class ReduceScatterDDP(nn.Module):
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
        self._known = list(module.parameters())
        parameters = [p for p in reversed(self._known) if p.dtype in FLOAT_TYPES]
        device = parameters[0].device
        mesh = DeviceMesh.from_group(members, device.type)
        trained, frozen = ([p for p in parameters if p.requires_grad is is_trained] for is_trained in (True, False))
        sizes = bucket_mb * MIB, first_bucket_mb * MIB
        filled = [*fill_buckets(trained, *sizes), *fill_buckets(frozen, *sizes)]
        self._buckets = [_bucket(f"bucket {number}", each, mesh) for number, each in enumerate(filled)]
        places = [bucket.place for bucket in self._buckets]
        self._control, line = (Line(group, device, transport, places) for _ in range(2))
        self._averager = Averager(self._buckets, self._control, line, device)
        self._lock = threading.Lock()  # autograd calls hooks in one thread per device
        self._pass, self._is_open = BackwardPass(), False
        self._kept: dict[nn.Parameter, Tensor] = {}
        """Rows of earlier passes, while a pass adds whole gradients."""
        self._hooked: set[nn.Parameter] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @disable_compile
    def _before_forward(self) -> None:
        if not torch.is_grad_enabled() or self._pass.is_running:
            return
        self._leave_unfinished_pass()
        if [*map(id, self._known)] != [*map(id, self.module.parameters())]:
            raise ValueError("parameters were added, replaced or removed: change the model before wrapping it")
        for number, bucket in enumerate(self._buckets):
            for at, p in enumerate(bucket.whole):
                self._hook(p, number, at)
        if self._broadcasts and (buffers := list(self.module.buffers())):
            broadcast(buffers, self.group)

    def _hook(self, p: Any, *place: int) -> None:
        if p.requires_grad and p not in self._hooked:
            self._hooked.add(p)
            before, after = (partial(_call_alive, weakref.ref(self), hook, *place) for hook in HOOKS)
            p.register_hook(before)
            p.register_post_accumulate_grad_hook(after)
        if len(p._post_accumulate_grad_hooks or ()) > 1:
            raise ValueError("hooks after a gradient's accumulation would run before it is averaged: remove them")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For code that accumulates gradients with DDP: they are averaged at once, since no rank keeps whole ones."""
        yield

    def finish_gradient_synchronization(self) -> None:
        """For code that waits for gradients after `backward()`, which has averaged them when it returns."""

    def _put_rows_aside(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        self._begin_pass()
        if isinstance(parameter.grad, DTensor):
            self._kept[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _gradient_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        bucket.hear(parameter)
        self._averager.reduce_complete(self._buckets)

    def _begin_pass(self) -> None:
        if not self._pass.is_running:
            self._leave_unfinished_pass()
            self._is_open = True
            self._pass.begin(self._end_pass)

    @torch.no_grad()
    def _end_pass(self) -> None:
        try:
            self._averager.finish(self._buckets)
        finally:
            self._leave_pass()

    def _leave_unfinished_pass(self) -> None:
        """Forget a pass that an exception has ended, and what it was to be added to, once its collectives are over."""
        if self._is_open:
            self._averager.forget()
            self._kept = {}
            self._leave_pass()

    def _leave_pass(self) -> None:
        kept, self._kept, self._is_open = self._kept, {}, False
        for p, rows in kept.items():
            p.grad = rows if p.grad is None else rows.add_(p.grad)
        self._pass.forget()

    def __getstate__(self) -> NoReturn:
        raise TypeError("a wrapper is one with those of other processes: save its `module`")


def fill_buckets(parameters: Sequence[nn.Parameter], size: float, first_size: float) -> list[list[nn.Parameter]]:
    """Parameters in their order, in buckets of one dtype that are full from so many bytes up."""
    buckets: list[list[nn.Parameter]] = []
    for p in parameters:
        n_bytes = sum(each.nbytes for each in buckets[-1]) if buckets else 0
        if not buckets or n_bytes >= (first_size if len(buckets) == 1 else size) or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def _bucket(place: str, parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> Bucket:
    shards = [shard_parameter(p, mesh, copy=False) for p in parameters]
    bucket = Bucket(place, parameters, shards, Layout(parameters, mesh))
    bucket.holders = list(parameters)
    return bucket


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


def _call_alive(wrapper: "weakref.ref[ReduceScatterDDP]", hook: str, *place: Any) -> None:
    """The hook of a wrapper, if there still is one: what autograd keeps must not keep the model alive."""
    if (alive := wrapper()) is not None:
        with alive._lock:
            bucket = alive._buckets[place[0]]
            getattr(alive, hook)(bucket, bucket.whole[place[1]])

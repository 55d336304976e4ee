"""Gradients averaged over ranks: each rank gets the mean of its rows, as soon as a bucket has all its gradients.

Buckets are averaged in the order in which backward comes to them, each waiting for those before it. What is incomplete
when the pass is over follows then: ranks first exchange which parameters have a gradient on any of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_gather, all_reduce, reduce_scatter
from labkit.parallel.sharding.layout import Layout, Sharded, gradient_rows
from labkit.parallel.transport.select_transport import member_group

END_OF_PASS = "the end of backward"


class Line:
    """Collectives in the background, one after the other, each after a check that all ranks begin the same one.

    A rank that does something else would wait for the others forever, or mix up their tensors. On a CPU ranks compare
    8 bytes each before a collective; on a GPU that would wait for the device, and nothing is compared.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, transport: str, places: Sequence[str]):
        """`places`: all that can be begun here, alike on all ranks."""
        self.channel, self._places = Channel(group, device, transport), [END_OF_PASS, *places]
        members = member_group(group)
        self._rank, self._p, self._is_checked = members.rank(), members.size(), device.type == "cpu"
        self._error: RuntimeError | None = None

    def start(self, place: str, action: Callable[[], None]) -> Wait:
        """Begin; call what is returned to wait for the end."""
        return self.channel.start(partial(self._run, place, action))

    def call(self, collective: Callable[..., None], vector: Tensor, *args: object, **options: object) -> None:
        """`collective(vector, ...)`, within an action."""
        self.channel.call(collective, vector, *args, **options)

    def _run(self, place: str, action: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        if self._is_checked and self._p > 1:
            numbers = torch.zeros(self._p, dtype=torch.float64)
            numbers[self._rank] = self._places.index(place)
            self.channel.call(all_gather, numbers)
            if len(set(numbers.tolist())) > 1:
                at = ", ".join(f"rank {rank} at {self._places[int(n)]}" for rank, n in enumerate(numbers.tolist()))
                self._error = RuntimeError(f"expected all ranks to run the same units in the same order; got {at}")
                raise self._error
        action()


class Bucket:
    """Parameters of one dtype: `whole` get gradients from autograd, `holders` the mean of this rank's rows."""

    is_last = False
    """Complete at the end of a pass only."""

    def __init__(self, place: str, whole: Sequence[nn.Parameter], shards: Sequence[Any], layout: Layout):
        self.place, self.whole, self.shards, self.layout = place, list(whole), list(shards), layout
        self.holders: list[Any] = self.shards
        self.reduce_dtype = whole[0].dtype
        self.heard: set[nn.Parameter] = set()
        """Parameters that have got a gradient, and may not get another one."""
        self.used: set[nn.Parameter] = set()
        """Parameters that have got a gradient in this pass."""
        self.is_reduced = False
        self._results: list[Tensor] = []

    @property
    def is_complete(self) -> bool:
        """Whether every trained parameter has a gradient."""
        return len(self.heard) == sum(p.requires_grad for p in self.whole)

    def hear(self, parameter: nn.Parameter) -> None:
        """The parameter has a gradient."""
        if has_whole_gradient(parameter) and parameter.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"expected dense gradients, got a sparse one in {self.place}")
        self.heard.add(parameter)
        self.used.add(parameter)

    def reduce(self, line: Line, vector: Tensor) -> Wait:
        """Begin to average, by way of the vector. A collective."""
        self.is_reduced = True
        gradients = [p.grad.detach() if has_whole_gradient(p) else None for p in self.whole]  # type: ignore[union-attr]
        self.layout.pack(vector, gradients)
        self.clear()
        return line.start(self.place, partial(self._reduce, line, vector))

    def _reduce(self, line: Line, vector: Tensor) -> None:
        part = vector.new_empty(self.layout.part)
        line.call(reduce_scatter, vector, "mean", into=part)
        self._results.append(part.to(self.shards[0].dtype))

    def assign(self, used: Sequence[bool]) -> None:
        """Averaged rows for the holders of parameters that are used, added to what they have."""
        for result in self._results:
            rows = self.layout.own_views(result)
            for holder, shard, own, is_used in zip(self.holders, self.shards, rows, used, strict=True):
                if is_used:
                    _give_gradient(holder, gradient_rows(own, shard))
        self._results = []

    def clear(self) -> None:
        """Drop whole gradients."""
        for p in self.whole:
            if has_whole_gradient(p):
                p.grad = None

    def leave_pass(self) -> None:
        self._results, self.is_reduced = [], False
        self.heard.clear()
        self.used.clear()


def has_whole_gradient(parameter: nn.Parameter) -> bool:
    """Whether there is a gradient that is not averaged yet."""
    return parameter.grad is not None and not isinstance(parameter.grad, DTensor)


def _give_gradient(holder: Any, gradient: Any) -> None:
    """Accumulate as autograd does; it does not see shards, so the hooks that users have left on them run here."""
    is_shard = isinstance(holder, Sharded)
    for hook in (holder._backward_hooks or {}).values() if is_shard else ():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if holder.grad is None:
        holder.grad = gradient
    else:
        holder.grad.add_(gradient)
    for hook in (holder._post_accumulate_grad_hooks or {}).values() if is_shard else ():
        hook(holder)


class Averager:
    """Averages the gradients of all buckets; `control` is where ranks exchange which parameters have some."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        control: Line,
        line: Line,
        device: torch.device,
        replicated: Sequence[nn.Parameter] = (),
    ):
        """`replicated`: parameters that every rank has whole, whose gradients are averaged at the end of a pass."""
        self._buckets, self._control, self._line, self._device = list(buckets), control, line, device
        self._replicated = list(replicated)
        n_bytes = max((bucket.layout.numel * bucket.reduce_dtype.itemsize for bucket in buckets), default=0)
        self._buffer = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._waits: list[Wait] = []
        self._begun = 0

    def reduce_complete(self, queue: Sequence[Bucket]) -> None:
        """Begin with buckets that have all their gradients; `queue`: those that backward has come to, in order."""
        queue = [bucket for bucket in queue if not bucket.is_last]
        while self._begun < len(queue) and queue[self._begun].is_complete:
            if queue[self._begun].used and not queue[self._begun].is_reduced:  # what is frozen has none
                self._reduce(queue[self._begun])
            self._begun += 1

    def finish(self, queue: Sequence[Bucket]) -> None:
        """Average all the rest, and hand it over. A collective."""
        used, late, replicated = self._exchange()
        for bucket in sorted(dict.fromkeys([*queue, *self._buckets]), key=lambda bucket: bucket.is_last):
            if not bucket.is_reduced and any(used[bucket]):
                self._reduce(bucket)
        for bucket in late:
            self._reduce(bucket)
        for p in replicated:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._waits.append(self._line.start(END_OF_PASS, partial(self._line.call, all_reduce, p.grad, "mean")))
        self._wait()
        for bucket in self._buckets:
            bucket.assign(used[bucket])
            bucket.leave_pass()

    def forget(self) -> None:
        """Drop a pass that an exception has ended, once its collectives are over."""
        self._wait()
        for bucket in self._buckets:
            bucket.clear()
            bucket.leave_pass()

    def _wait(self) -> None:
        waits, self._waits, self._begun = self._waits, [], 0
        for wait in waits:
            wait()

    def _reduce(self, bucket: Bucket) -> None:
        for wait in self._waits[-1:]:
            wait()  # there is one buffer
        n_bytes = bucket.layout.numel * bucket.reduce_dtype.itemsize
        self._waits.append(bucket.reduce(self._line, self._buffer[:n_bytes].view(bucket.reduce_dtype)))

    def _exchange(self) -> tuple[dict[Bucket, list[bool]], list[Bucket], list[nn.Parameter]]:
        """What has a gradient on any rank: parameters by bucket, buckets that got one late, replicated parameters."""
        flags = [p in bucket.used or has_whole_gradient(p) for bucket in self._buckets for p in bucket.whole]
        flags += [bucket.is_reduced and any(map(has_whole_gradient, bucket.whole)) for bucket in self._buckets]
        flags += [p.grad is not None for p in self._replicated]
        notes = torch.tensor(flags, dtype=torch.float64, device=self._device)
        self._control.start(END_OF_PASS, partial(self._control.call, all_reduce, notes, "sum"))()
        found = iter([flag > 0 for flag in notes.tolist()])
        used = {bucket: [next(found) for _ in bucket.whole] for bucket in self._buckets}
        late = [bucket for bucket in self._buckets if next(found)]
        return used, late, [p for p in self._replicated if next(found)]

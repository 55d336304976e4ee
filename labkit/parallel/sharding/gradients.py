"""Gradients averaged over ranks: each rank gets the mean of its rows, once a bucket has all its gradients.

All ranks average buckets in the order in which backward reaches them. At the end of backward, ranks exchange which
parameters have a gradient on any of them, and average the rest.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.parallel.background_comm import END_OF_PASS, CheckedChannel, Wait
from labkit.parallel.backward_pass import BackwardPass
from labkit.parallel.collectives import add_steps, all_reduce
from labkit.parallel.prepare import cut
from labkit.parallel.sharding.rows import (
    MESSAGES_IN_FLIGHT,
    Sharded,
    as_gradient,
    flatten,
    row_strides,
    rows_by_rank,
    separate_small,
    unpack,
    with_strides,
)
from labkit.parallel.traffic import count_traffic
from labkit.parallel.transport import AUTO, find_transport
from labkit.parallel.transport.base import Step, Transport


def average_rows(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    results: Sequence[Tensor],
    *,
    transport: str | Transport = AUTO,
) -> None:
    """Write the mean over ranks of this rank's rows of each gradient into `results`. A collective.

    Gradients are of one dtype, and have `row_strides` as the results. Rank r adds the rows that the others send it to
    its own: n (p-1)/p bytes sent per rank for n bytes of gradients.
    """
    via = find_transport(group, gradients[0].device, transport)
    p, depth = via.world_size, max(1, MESSAGES_IN_FLIGHT * (via.world_size - 1))
    is_divided_first = gradients[0].dtype == torch.float16 or p == 1  # so that a mean cannot overflow on the way
    whole = [(gradient / p if is_divided_first else gradient).to(via.device) for gradient in gradients]
    means = [flatten(result).to(via.device) for result in results]
    large, small = separate_small([[*rows_by_rank(each, p), mean] for each, mean in zip(whole, means, strict=True)])
    packed = [torch.cat(blocks) for blocks in zip(*small, strict=True)]
    steps: list[Step] = []
    for by_rank in [*large, packed] if small else large:
        *pieces, totals = cut(by_rank, via, depth)
        steps += chain.from_iterable(add_steps(pieces, totals, via, 1 if is_divided_first else p))
        if p == 1:
            by_rank[-1].copy_(by_rank[0])
    count_traffic(via, "reduce_scatter", "butterfly", gradients).run(steps, depth)
    if small:
        unpack(packed[-1], [by_rank[-1] for by_rank in small])
    for result, mean in zip(results, means, strict=True):
        if mean.device != result.device:
            flatten(result).copy_(mean)


PATIENCE_S = 1.0  # for other ranks to average a bucket during backward


@dataclass(eq=False)
class Bucket:
    """Parameters that are averaged together: `whole` get gradients from autograd, `holders` get rows of the mean."""

    name: str
    whole: list[nn.Parameter]
    shards: list[Any]
    holders: list[Any]
    reduce_dtype: torch.dtype | None = None
    """Dtype of the average; None: each gradient's."""
    is_last: bool = False
    """Complete only at the end of a pass."""
    ready: set[nn.Parameter] = field(default_factory=set)
    """Parameters whose gradient is complete."""
    used: set[nn.Parameter] = field(default_factory=set)
    """Parameters that got a gradient in this pass."""
    is_reduced: bool = False
    results: list[tuple[int, Tensor]] = field(default_factory=list)
    """Averaged rows, by index of the parameter."""
    earlier: dict[nn.Parameter, Any] = field(default_factory=dict)
    """Averaged rows of earlier passes, set aside while autograd accumulates whole gradients."""

    @cached_property
    def _strides(self) -> list[tuple[int, ...]]:
        return [row_strides(p) for p in self.whole]  # not of shards: slicing a DTensor is a collective

    @cached_property
    def _trained(self) -> list[int]:
        return [index for index, p in enumerate(self.whole) if p.requires_grad]

    @property
    def is_complete(self) -> bool:
        """Return whether every trained parameter has a gradient."""
        return len(self.ready) == len(self._trained)

    @property
    def is_late(self) -> bool:
        """Return whether it has gradients that came after its average."""
        return self.is_reduced and any(map(has_whole_gradient, self.whole))

    def start_average(self, channel: CheckedChannel) -> Wait:
        """Start to average, and drop whole gradients. A collective."""
        self.is_reduced, pairs = True, []
        for index in self._trained:
            p, rows, strides = self.whole[index], self.shards[index]._local_tensor, self._strides[index]
            options: Any = {"dtype": self.reduce_dtype or p.dtype, "device": rows.device}
            if has_whole_gradient(p):
                gradient = with_strides(p.grad.detach().to(options["dtype"]), strides)  # type: ignore[union-attr]
            else:
                gradient = torch.empty_strided(p.shape, strides, **options).zero_()
            result = torch.empty_strided(rows.shape, strides, **options)
            pairs.append((gradient, result))
            self.results.append((index, result))
        self.drop_whole_gradients()
        return channel.start_checked(self.name, partial(_average, channel, pairs), len(self._trained))

    def assign(self, is_used: Sequence[bool]) -> None:
        """Add the averaged rows of used parameters to the gradients of their holders."""
        for index, result in self.results:
            if is_used[index]:
                shard = self.shards[index]
                _accumulate(self.holders[index], as_gradient(result.to(shard.dtype), shard))
        self.results = []

    def set_rows_aside(self) -> None:
        """Set aside averaged rows of earlier passes: autograd cannot add whole gradients to them."""
        for p in self.whole:
            if isinstance(p.grad, DTensor):
                self.earlier[p], p.grad = p.grad, None

    def drop_whole_gradients(self) -> None:
        """Drop gradients that are in flight, or that an exception left behind."""
        for p in self.whole:
            if has_whole_gradient(p):
                p.grad = None

    def reset_pass(self) -> None:
        """Restore the rows of earlier passes, and forget this pass."""
        for p, rows in self.earlier.items():
            p.grad = rows if p.grad is None else rows.add_(p.grad)
        self.earlier, self.results, self.is_reduced = {}, [], False
        self.ready.clear()
        self.used.clear()
        self.__dict__.pop("_trained", None)


def _average(channel: CheckedChannel, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient, result in pairs:
        if gradient.dim():
            alike.setdefault(gradient.dtype, []).append((gradient, result))
        else:
            channel.call(all_reduce, result.copy_(gradient))
    for same_dtype in alike.values():
        channel.call(average_rows, *map(list, zip(*same_dtype, strict=True)))


def has_whole_gradient(parameter: nn.Parameter) -> bool:
    """Return whether there is a gradient that is not averaged."""
    return parameter.grad is not None and not isinstance(parameter.grad, DTensor)


def _accumulate(holder: Any, gradient: Any) -> None:
    """Accumulate as autograd does. Autograd never reaches a shard: this runs the hooks that users put on it."""
    is_shard = isinstance(holder, Sharded)
    for hook in (holder._backward_hooks or {}).values() if is_shard else ():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    holder.grad = gradient if holder.grad is None else holder.grad.add_(gradient)
    for hook in (holder._post_accumulate_grad_hooks or {}).values() if is_shard else ():
        hook(holder)


class GradientPass:
    """Follows a backward pass from its first sign to its end, and averages the gradients of all buckets."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        control: CheckedChannel,
        channel: CheckedChannel,
        *,
        replicated: Sequence[nn.Parameter] = (),
        is_in_order: bool = True,
    ):
        """`control` carries the flags at the end of a pass, `channel` the averages.

        `replicated`: parameters that every rank has whole. `is_in_order`: average buckets in their order, else in that
        of `queue_bucket`.
        """
        self._buckets, self._control, self._channel = list(buckets), control, channel
        self._replicated, self._is_in_order = list(replicated), is_in_order
        self._lock = threading.RLock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._queue: list[Bucket] = []
        self._n_started = 0
        """How many of the queue are started, or need not be."""
        self._waits: list[Wait] = []
        self._waits_in_backward = True

    @property
    def is_running(self) -> bool:
        """Return whether a backward pass is running."""
        return self._pass.is_running

    def hook(self, method: Callable[..., None], *args: object) -> Callable[..., None]:
        """Return a hook for autograd that calls a method under the lock. It does not keep this object alive."""
        return partial(_call_if_alive, weakref.ref(self), method.__name__, args)

    def begin(self, *_: object) -> None:
        """Note a sign of a backward pass; the first one begins it."""
        if not self.is_running:
            self.abandon_unfinished()
            self._queue = list(self._buckets) if self._is_in_order else []
            for bucket in self._buckets:
                bucket.set_rows_aside()
            self._pass.begin(self._end)

    def queue_bucket(self, bucket: Bucket) -> None:
        """Note that backward has reached a bucket."""
        if not bucket.is_last:
            self._queue.append(bucket)

    def note_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Note a complete gradient, and start to average the buckets that are complete."""
        self.begin()
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(f"expected dense gradients, got a sparse one in {bucket.name}")
        bucket.ready.add(parameter)
        bucket.used.add(parameter)
        while self._n_started < len(self._queue) and (first := self._queue[self._n_started]).is_complete:
            if first.used and not first.is_reduced:  # frozen parameters have no gradient
                self._start_average(first)
            self._n_started += 1

    def _end(self) -> None:
        try:
            with torch.no_grad():
                self.finish()
        finally:
            self.reset()

    def finish(self) -> None:
        """Average the rest, and assign all averages. A collective."""
        used, late, replicated = self._exchange_flags()
        for bucket in dict.fromkeys([*self._queue, *self._buckets]):
            if not bucket.is_reduced and any(used[bucket]):
                self._start_average(bucket)
        for bucket in late:
            self._start_average(bucket)
        for p in replicated:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            average = partial(self._channel.call, all_reduce, p.grad)
            self._waits.append(self._channel.start_checked(END_OF_PASS, average))
        self._wait()
        for bucket in self._buckets:
            bucket.assign(used[bucket])

    def abandon_unfinished(self) -> None:
        """Forget a pass that an exception ended, once its collectives are over."""
        if self._pass.is_unfinished:
            self._wait()
            for bucket in self._buckets:
                bucket.drop_whole_gradients()
                bucket.earlier = {}
            self.reset()

    def reset(self) -> None:
        """Forget this pass."""
        for bucket in self._buckets:
            bucket.reset_pass()
        self._queue, self._n_started = [], 0
        self._pass.reset()

    def _wait(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def _start_average(self, bucket: Bucket) -> None:
        # One average at a time, else whole gradients of many buckets would be alive at once. But a rank that does not
        # use all of a bucket starts its average after the pass, and waits for this rank: after one such, do not wait.
        if self._waits and self._waits_in_backward:
            self._waits_in_backward = bool(self._waits[-1](PATIENCE_S))
        with torch.no_grad():
            self._waits.append(bucket.start_average(self._channel))

    def _exchange_flags(self) -> tuple[dict[Bucket, list[bool]], list[Bucket], list[nn.Parameter]]:
        """Return what has gradients on any rank: parameters by bucket, late buckets, replicated parameters."""
        flags = [p in bucket.used or has_whole_gradient(p) for bucket in self._buckets for p in bucket.whole]
        flags += [bucket.is_late for bucket in self._buckets] + [p.grad is not None for p in self._replicated]
        counts = torch.tensor(flags, dtype=torch.float64, device=self._control.transport.device)
        self._control.start_checked(END_OF_PASS, partial(self._control.call, all_reduce, counts))()
        on_any = iter([count > 0 for count in counts.tolist()])
        used = {bucket: [next(on_any) for _ in bucket.whole] for bucket in self._buckets}
        late = [bucket for bucket in self._buckets if next(on_any)]
        return used, late, [p for p in self._replicated if next(on_any)]


def _call_if_alive(owner: "weakref.ref[GradientPass]", method: str, args: Sequence[Any], *more: object) -> None:
    if (alive := owner()) is not None:
        with alive._lock:
            getattr(alive, method)(*args, *more)

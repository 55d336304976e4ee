"""Gradients averaged over ranks: each rank gets the mean of its rows, as soon as a bucket has all its gradients.

Buckets are averaged in the order in which backward comes to them, each waiting for those before it. What is incomplete
when the pass is over follows then: ranks first exchange which parameters have a gradient on any of them.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.parallel.background_comm import Wait
from labkit.parallel.backward_pass import BackwardPass
from labkit.parallel.collectives import all_reduce
from labkit.parallel.sharding.line import END_OF_PASS, Line
from labkit.parallel.sharding.rows import Sharded, average_rows, by_rows, gradient_rows, row_strides


class Bucket:
    """Parameters that are averaged together: `whole` get gradients from autograd, `holders` the mean of own rows."""

    is_last = False
    """Complete at the end of a pass only."""
    reduce_dtype: torch.dtype | None = None
    """That gradients are averaged in; None: their own."""

    def __init__(self, place: str, whole: Sequence[nn.Parameter], shards: Sequence[Any], holders: Sequence[Any] = ()):
        self.place, self.whole, self.shards = place, list(whole), list(shards)
        self.holders = list(holders) or self.shards
        self._strides = [row_strides(shard) for shard in shards]
        self.ready: set[nn.Parameter] = set()
        """Parameters that have a gradient, and may not get another one."""
        self.used: set[nn.Parameter] = set()
        """Parameters that have got a gradient in this pass."""
        self.is_reduced = False
        self._results: list[tuple[int, Tensor]] = []
        self._earlier: dict[nn.Parameter, Any] = {}
        """Rows of earlier passes, while a pass adds whole gradients."""

    @cached_property
    def _trained(self) -> list[int]:
        return [index for index, p in enumerate(self.whole) if p.requires_grad]

    @property
    def is_complete(self) -> bool:
        """Whether every trained parameter has a gradient."""
        return len(self.ready) == len(self._trained)

    def note_gradient(self, parameter: nn.Parameter) -> None:
        """Note that the parameter has a gradient."""
        if has_whole_gradient(parameter) and parameter.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"expected dense gradients, got a sparse one in {self.place}")
        self.ready.add(parameter)
        self.used.add(parameter)

    def reduce(self, line: Line) -> Wait:
        """Begin to average, and drop whole gradients. A collective."""
        self.is_reduced, pairs, scalars = True, [], []
        for index in self._trained:
            p, shard, strides = self.whole[index], self.shards[index], self._strides[index]
            dtype, rows = self.reduce_dtype or p.dtype, shard._local_tensor
            if has_whole_gradient(p):
                gradient = by_rows(p.grad.detach().to(dtype), strides)  # type: ignore[union-attr]
            else:
                gradient = torch.empty_strided(p.shape, strides, dtype=dtype, device=rows.device).zero_()
            if p.dim():
                result = torch.empty_strided(rows.shape, strides, dtype=dtype, device=rows.device)
                pairs.append((gradient, result))
            else:
                result = gradient.clone()
                scalars.append(result)
            self._results.append((index, result))
        self.clear()
        return line.start(self.place, partial(_average, line, pairs, scalars), len(self._trained))

    def assign(self, used: Sequence[bool]) -> None:
        """Averaged rows for the holders of parameters that are used, added to what they have."""
        for index, result in self._results:
            if used[index]:
                shard = self.shards[index]
                _give_gradient(self.holders[index], gradient_rows(result.to(shard.dtype), shard))
        self._results = []

    def put_aside(self) -> None:
        """Take rows of earlier passes, to which autograd cannot add."""
        for p in self.whole:
            if isinstance(p.grad, DTensor):
                self._earlier[p], p.grad = p.grad, None

    def clear(self) -> None:
        """Drop whole gradients."""
        for p in self.whole:
            if has_whole_gradient(p):
                p.grad = None

    def forget_pass(self) -> None:
        """Drop what an exception has left, and what it was to be added to."""
        self.clear()
        self._earlier = {}

    def leave_pass(self) -> None:
        """Be ready for the next pass."""
        for p, rows in self._earlier.items():
            p.grad = rows if p.grad is None else rows.add_(p.grad)
        self._earlier, self._results, self.is_reduced = {}, [], False
        self.ready.clear()
        self.used.clear()
        self.__dict__.pop("_trained", None)


def _average(line: Line, pairs: Sequence[tuple[Tensor, Tensor]], scalars: Sequence[Tensor]) -> None:
    line.call(average_rows, [gradient for gradient, _ in pairs], [result for _, result in pairs])
    if scalars:
        vector = torch.stack(list(scalars))
        line.call(all_reduce, vector)
        torch._foreach_copy_(list(scalars), list(vector.unbind()))


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


class AveragesAtOnce(nn.Module):
    """A wrapper whose gradients are averaged in each pass, since no rank keeps whole ones."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For code that accumulates gradients with DDP: they are averaged all the same."""
        yield

    def finish_gradient_synchronization(self) -> None:
        """For code that waits for gradients after `backward()`, which has averaged them when it returns."""

    def __getstate__(self) -> NoReturn:
        raise TypeError("a wrapper is one with those of other processes: save its state_dict(), or its `module`")


class GradientPass:
    """Follows a backward pass, from its first sign to its end, and averages the gradients of all buckets."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        control: Line,
        line: Line,
        device: torch.device,
        *,
        replicated: Sequence[nn.Parameter] = (),
        is_in_order: bool = True,
    ):
        """`control`: where ranks exchange which parameters have gradients.

        `replicated`: parameters that every rank has whole, whose gradients are averaged at the end of a pass.
        `is_in_order`: buckets are averaged in their order, not in that of `queue_bucket`.
        """
        self._buckets, self._control, self._line, self._device = list(buckets), control, line, device
        self._replicated, self._is_in_order = list(replicated), is_in_order
        self._lock = threading.RLock()  # autograd calls hooks in one thread per device
        self._pass = BackwardPass()
        self._is_open = False
        """A pass has begun and has not been left, be it that an exception has ended it."""
        self._queue: list[Bucket] = []
        self._begun = 0
        """How many in the queue have begun, or need not."""
        self._waits: list[Wait] = []

    @property
    def is_running(self) -> bool:
        """Whether a backward pass is under way."""
        return self._pass.is_running

    def hook(self, method: Callable[..., None], *args: object) -> Callable[..., None]:
        """A hook for autograd that calls a method in the lock, while there is an owner: it keeps nothing alive."""
        return partial(_call_alive, weakref.ref(self), method.__name__, [weakref.ref(arg) for arg in args])

    def begin(self, *_: object) -> None:
        """Note a sign of a backward pass; the first one begins it."""
        if not self._pass.is_running:
            self.leave_unfinished()
            self._is_open, self._queue = True, list(self._buckets) if self._is_in_order else []
            for bucket in self._buckets:
                bucket.put_aside()
            self._pass.begin(self._end)

    def queue_bucket(self, bucket: Bucket) -> None:
        """Note that backward has come to a bucket."""
        if not bucket.is_last:
            self._queue.append(bucket)

    def note_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Note a gradient, and begin to average what is complete."""
        self.begin()
        bucket.note_gradient(parameter)
        while self._begun < len(self._queue):
            first = self._queue[self._begun]
            if not first.is_complete:
                break
            if first.used and not first.is_reduced:  # what is frozen has no gradient
                self._reduce(first)
            self._begun += 1

    def _end(self) -> None:
        try:
            with torch.no_grad():
                self.finish()
        finally:
            self.leave()

    def finish(self) -> None:
        """Average all the rest, and hand it over. A collective."""
        used, late, replicated = self._exchange()
        for bucket in sorted(dict.fromkeys([*self._queue, *self._buckets]), key=lambda bucket: bucket.is_last):
            if not bucket.is_reduced and any(used[bucket]):
                self._reduce(bucket)
        for bucket in late:
            self._reduce(bucket)
        for p in replicated:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._waits.append(self._line.start(END_OF_PASS, partial(self._line.call, all_reduce, p.grad)))
        self._wait()
        for bucket in self._buckets:
            bucket.assign(used[bucket])

    def leave_unfinished(self) -> None:
        """Forget a pass that an exception has ended, once its collectives are over."""
        if self._is_open:
            self._wait()
            for bucket in self._buckets:
                bucket.forget_pass()
            self.leave()

    def leave(self) -> None:
        """Be ready for the next pass."""
        for bucket in self._buckets:
            bucket.leave_pass()
        self._is_open, self._queue, self._begun = False, [], 0
        self._pass.reset()

    def _wait(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def _reduce(self, bucket: Bucket) -> None:
        for wait in self._waits[-1:]:
            wait()  # else whole gradients of many buckets would wait for their turn
        with torch.no_grad():
            self._waits.append(bucket.reduce(self._line))

    def _exchange(self) -> tuple[dict[Bucket, list[bool]], list[Bucket], list[nn.Parameter]]:
        """What has a gradient on any rank: parameters by bucket, buckets that got one late, replicated parameters."""
        flags = [p in bucket.used or has_whole_gradient(p) for bucket in self._buckets for p in bucket.whole]
        flags += [bucket.is_reduced and any(map(has_whole_gradient, bucket.whole)) for bucket in self._buckets]
        flags += [p.grad is not None for p in self._replicated]
        notes = torch.tensor(flags, dtype=torch.float64, device=self._device)
        self._control.start(END_OF_PASS, partial(self._control.call, all_reduce, notes))()
        flags_anywhere = iter([flag > 0 for flag in notes.tolist()])
        used = {bucket: [next(flags_anywhere) for _ in bucket.whole] for bucket in self._buckets}
        late = [bucket for bucket in self._buckets if next(flags_anywhere)]
        return used, late, [p for p in self._replicated if next(flags_anywhere)]


def _call_alive(
    owner: "weakref.ref[GradientPass]", method: str, args: "Sequence[weakref.ref[Any]]", *more: object
) -> None:
    if (alive := owner()) is not None:
        with alive._lock:
            getattr(alive, method)(*(arg() for arg in args), *more)

"""The four wrappers: gradients averaged after backward, or in buckets while backward runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.data_parallel.base import DataParallel
from labkit.parallel.data_parallel.buckets import MIB, Bucket, assign_buckets
from labkit.parallel.overlap import Wait
from labkit.parallel.prepare import strides_like
from labkit.torch_private import count_storage_references, foreach_copy_

CommHook = Callable[[Any, Bucket], torch.futures.Future[Any]]
ONE_BYTE_MB = 1 / MIB


class NaiveDDP(DataParallel):
    """One collective per parameter, one after the other, after backward: as many latencies as
    parameters."""

    def _finish(self, pending: list[int]) -> None:
        # The order of the wrapping, which all ranks have; gradients become ready in other ones.
        for parameter in self._backward_order:
            self._all_reduce.average(_flat_gradient(parameter))


class FlatDDP(DataParallel):
    """All gradients of a dtype copied into one vector, one collective, copied back: twice the
    memory."""

    def _finish(self, pending: list[int]) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._backward_order:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(
                _flat_gradient(parameter)
            )
        for gradients in by_kind.values():
            flat = torch.cat(gradients)
            self._all_reduce.average(flat)
            foreach_copy_(gradients, flat.split([gradient.numel() for gradient in gradients]))


class BucketedDDP(DataParallel):
    """One collective per bucket, started as soon as its last gradient is ready. Gradients become
    views of buckets.

    Args:
        bucket_mb: MiB of gradients that fill a bucket. `bucket_cap_mb`, torch's name, also sets the
        first bucket. first_bucket_mb: the same for the first bucket. overlap: if False, or with
        `find_unused`, collectives start after backward. gradient_as_bucket_view: if False, averaged
        gradients are copied out of the buckets.

    Other arguments as `DataParallel`. ValueError, on all ranks, for sizes that are not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        overlap: bool = True,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        **options: Any,
    ):
        # Before the base class, which compares the options of all ranks.
        self._sizes_mb = (bucket_mb, first_bucket_mb)
        if bucket_cap_mb is not None:
            self._sizes_mb = (bucket_cap_mb, bucket_cap_mb)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        super().__init__(module, device_ids, **options)
        self._overlaps = overlap and not self.find_unused
        parameters = self._backward_order
        buckets = assign_buckets(parameters, *self._sizes_mb)
        self._buckets = [
            Bucket(
                {index: parameters[index] for index in indices},
                number,
                is_last=number == len(buckets) - 1,
            )
            for number, indices in enumerate(buckets)
        ]
        self._bucket_by_index = {
            index: bucket for bucket in self._buckets for index in bucket.by_index
        }
        self._waits: list[Wait] = []
        self._comm_hook: Callable[[Bucket], torch.futures.Future[Any]] | None = None
        # torch's collectives sum: gradients are divided one by one, while they are in the cache
        self._op, self._divisor = (
            ("mean", 1) if self._all_reduce.channels else ("sum", self.world_size)
        )

    def _describe(self, *arguments: Any) -> dict[str, object]:
        if not min(self._sizes_mb) > 0:
            raise ValueError(f"expected bucket sizes above 0 MB, got {self._sizes_mb}")
        return super()._describe(*arguments) | {"bucket sizes": self._sizes_mb}

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let `hook(state, bucket)`, written for torch's wrapper, average buckets."""
        self._comm_hook = partial(hook, state)
        self._divisor = 1

    def _prepare_for_backward(self) -> None:
        super()._prepare_for_backward()
        for bucket in self._buckets:
            if bucket.has_outside_references():
                bucket.allocate()

    def _gradient_ready(self, index: int) -> None:
        self._fill(index)
        if not self._bucket_by_index[index].n_missing:
            self._start_complete_buckets()

    def _finish(self, pending: list[int]) -> None:
        for index in pending:
            self._fill(index)
        self._start_complete_buckets()
        self._wait()
        if not self.gradient_as_bucket_view:
            for bucket in self._buckets:
                for index, parameter in bucket.by_index.items():
                    _writable_gradient(parameter).copy_(bucket.views[index])

    def _fill(self, index: int) -> None:
        """Copy the divided gradient, or zeros, into its bucket. `p.grad` becomes a view of the
        bucket."""
        bucket = self._bucket_by_index[index]
        parameter = self._backward_order[index]
        view = bucket.views[index]
        gradient = parameter.grad
        bucket.n_missing -= 1
        if gradient is not None and bucket.holds(index, gradient):
            if self._divisor > 1:
                view.div_(self._divisor)
            return
        if gradient is None:
            # Another rank may have a gradient for it, and every rank takes part in the mean.
            view.zero_()
        elif gradient.dtype != view.dtype or gradient.shape != view.shape:
            raise RuntimeError(
                f"{self._names[index]} has changed since the model was wrapped: wrap it again"
            )
        else:
            torch.div(gradient, self._divisor, out=view)
        if self.gradient_as_bucket_view:
            # a new tensor each time: a user's `.data = ` changes only that one
            parameter.grad = view.detach()

    def _start_complete_buckets(self) -> None:
        """Start the collectives of buckets that have all gradients, in the same order on every
        rank."""
        while (number := len(self._waits)) < len(self._buckets) and not self._buckets[
            number
        ].n_missing:
            bucket = self._buckets[number]
            if self._comm_hook is None:
                self._waits.append(self._all_reduce.start(bucket.memory, self._op))
            else:
                # The hook starts its collective now; its result is a copy that has to come back.
                self._waits.append(partial(bucket.store, self._comm_hook(bucket)))

    def _wait(self) -> None:
        for wait in self._waits:
            wait()

    def _reset_pass(self) -> None:
        super()._reset_pass()
        self._waits = []
        for bucket in self._buckets:
            bucket.n_missing = len(bucket.by_index)
            bucket.sent = bucket.memory


class OverlappedDDP(BucketedDDP):
    """One collective per parameter, started as soon as its gradient is ready: buckets of one
    parameter each.

    All ranks start the collectives in one order. One whose gradient is ready early waits for those
    before it.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        **options: Any,
    ):
        super().__init__(
            module, device_ids, bucket_mb=ONE_BYTE_MB, first_bucket_mb=ONE_BYTE_MB, **options
        )


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient's elements in the order of memory, a contiguous view, (n,)."""
    gradient = _writable_gradient(parameter)
    flat = (gradient.numel(),), (1,), gradient.storage_offset()
    # An ordinary tensor, if gradients are of a class.
    return gradient.detach().as_subclass(Tensor).as_strided(*flat)


def _writable_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient, zeros if there is none, with the parameter's strides, in memory of its
    own.

    Collectives send elements in the order of memory, which must be the same on all ranks. Autograd
    may give several leaves the same memory as gradient. A part of a larger vector stays: a user
    wants it there.
    """
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif gradient.stride() != strides_like(parameter) or gradient.is_conj() or gradient.is_neg():
        gradient = torch.empty_like(parameter).copy_(gradient)
    # two references: the tensor itself, and Python's object for its storage
    elif (
        count_storage_references(gradient) > 2
        and gradient.untyped_storage().nbytes() == gradient.nbytes
    ):
        gradient = gradient.clone()
    parameter.grad = gradient
    return gradient

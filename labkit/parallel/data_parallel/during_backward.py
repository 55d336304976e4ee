"""Gradients averaged while backward still runs: communication hides behind computation, where there is room."""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.background_comm import Wait
from labkit.parallel.data_parallel.buckets import Schedule, assign_by_schedule, assign_to_buckets, make_buckets
from labkit.parallel.data_parallel.contract import DataParallel, Empty
from labkit.parallel.data_parallel.layout import flat_view, gradient_to_write, shares_memory


class OverlappedDDP(DataParallel):
    """One collective a parameter, begun as soon as its gradient is there.

    Ranks must begin collectives in one order. Gradients may become ready in another, and not in the same one
    everywhere: each waits until all before it have begun.
    """

    def __init__(self, module: nn.Module, **options: Any):
        self._begun: list[tuple[Tensor, Tensor, Wait]] = []
        super().__init__(module, **options)

    @property
    def _overlaps(self) -> bool:
        return not self.find_unused

    def _gradient_ready(self, index: int) -> None:
        while (next_one := len(self._begun)) < len(self._ready) and self._ready[next_one]:
            self._begin(self._parameters_in_order[next_one])

    def _finish(self, pending: list[int]) -> None:
        for parameter in self._parameters_in_order[len(self._begun) :]:
            self._begin(parameter)
        self._abandon()

    def _begin(self, parameter: Tensor) -> None:
        gradient = gradient_to_write(parameter)
        # What the rest of the pass may still read is not what is written in the meantime.
        sent = gradient.clone() if shares_memory(gradient) else gradient
        self._begun.append((gradient, sent, self._average.start(flat_view(sent), "mean")))

    @torch.no_grad()
    def _abandon(self) -> None:
        for gradient, sent, wait in self._begun:
            wait()
            if sent is not gradient:
                gradient.copy_(sent)

    def _forget_pass(self) -> None:
        super()._forget_pass()
        self._begun = []


class BucketedDDP(DataParallel):
    """One collective a bucket, begun as soon as the bucket's last gradient is there. Gradients are views of buckets.

    Args:
        bucket_mb: a bucket is full from so many MiB of gradients on.
        first_bucket_mb: the same for the first bucket.
        overlap: if False, the collectives begin when backward is over.
        schedule: which parameters are averaged together, and in which order, whatever their sizes.

    Other arguments as `DataParallel`; ValueError for sizes that are not positive, and for a schedule that leaves a
    parameter out or has one twice.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        overlap: bool = True,
        schedule: Schedule | None = None,
        **options: Any,
    ):
        self.overlap = overlap
        self._sizes_mb = (bucket_mb, first_bucket_mb)
        trained = {name: p for name, p in reversed(list(module.named_parameters())) if p.requires_grad}
        self._assigned: list[list[int]] | None = None
        try:
            self._assigned = assign_by_schedule(schedule, trained) if schedule else None
        except Exception as error:
            self._refused = error  # the others wait for this rank until it is told
        super().__init__(module, **options)

    def _settings(self) -> dict[str, object]:
        return super()._settings() | {"bucket_mb, first_bucket_mb": self._sizes_mb, "schedule": self._assigned}

    def _attach(self, empty: Empty) -> None:
        parameters = self._parameters_in_order
        assigned = self._assigned or assign_to_buckets(parameters, *self._sizes_mb)
        self._buckets = make_buckets(assigned, parameters, empty)
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        super()._attach(empty)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("_buckets", "_bucket_of", "_waits")}

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets, in the order in which they are averaged."""
        return [bucket.buffer.nbytes for bucket in self._buckets]

    @property
    def _overlaps(self) -> bool:
        return self.overlap and not self.find_unused

    def _gradient_ready(self, index: int) -> None:
        self._put(index)
        if not self._bucket_of[index].missing:
            self._begin_full()

    def _finish(self, pending: list[int]) -> None:
        for index in pending:
            self._put(index)
        self._begin_full()
        self._wait()

    def _put(self, index: int) -> None:
        """The gradient, divided by the number of ranks, into its view; `p.grad` is the view from now on."""
        parameter, bucket = self._parameters_in_order[index], self._bucket_of[index]
        gradient, view = parameter.grad, bucket.views[index]
        if gradient is None:
            view.zero_()
        elif gradient is view:
            view.div_(self.world_size)
        else:
            torch.div(gradient, self.world_size, out=view)
        parameter.grad = view
        bucket.missing -= 1

    def _begin_full(self) -> None:
        """Begin buckets that are full, in their order: every rank must begin them in the same one."""
        while (next_one := len(self._waits)) < len(self._buckets) and self._buckets[next_one].missing == 0:
            self._waits.append(self._average.start(self._buckets[next_one].buffer, "sum"))

    def _wait(self) -> None:
        for wait in self._waits:
            wait()

    def _abandon(self) -> None:
        self._wait()
        for bucket in self._buckets[len(self._waits) :]:
            for index in bucket.indices:
                if self._overlaps and self._ready[index]:  # was divided when it was put
                    bucket.views[index].mul_(self.world_size)

    def _forget_pass(self) -> None:
        super()._forget_pass()
        self._waits: list[Wait] = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)

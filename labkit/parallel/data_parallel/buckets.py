"""Buckets: which gradients are averaged together (`assign_buckets`), and their memory
(`Bucket`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.parallel.prepare import strides_like
from labkit.torch_private import count_storage_references

MIB = 2**20


def assign_buckets(
    parameters: Sequence[Tensor], bucket_mb: float, first_bucket_mb: float
) -> list[list[int]]:
    """Assign parameters, in the order of backward, to buckets: return indices by bucket, in the
    order of averaging.

    A bucket has one dtype and device, and is full once it holds `bucket_mb` MiB or more. The first
    one of each dtype and device is full at the smaller of `first_bucket_mb` and `bucket_mb`, so
    that communication starts early. Buckets that are never full come last. A parameter is never
    split. As torch's `_compute_bucket_assignment_by_size`.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], float] = {}
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket = filling.setdefault(kind, [])
        bucket.append(index)
        n_bytes = sum(parameters[i].nbytes for i in bucket)
        limit_mb = limits.get(kind, min(first_bucket_mb, bucket_mb))
        # A parameter that fills the bucket goes into it, as in torch: it may exceed the limit.
        if n_bytes >= limit_mb * MIB:
            full.append(filling.pop(kind))
            limits[kind] = bucket_mb
    return full + sorted(filling.values())  # by their first index


class Bucket:
    """Parameters of one dtype and device, by index, and one vector with a view for each
    gradient."""

    def __init__(self, by_index: dict[int, nn.Parameter], number: int, *, is_last: bool) -> None:
        self.by_index = by_index
        self._number = number
        self._is_last = is_last
        self.n_missing = len(by_index)  # gradients of this pass that are not ready yet
        self.allocate()

    def allocate(self) -> None:
        """Take new memory. Gradients of earlier passes keep the old one alive."""
        first = next(iter(self.by_index.values()))
        numel = sum(parameter.numel() for parameter in self.by_index.values())
        self.memory = self.sent = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.views = dict(zip(self.by_index, self.gradients(), strict=True))
        self._places = {
            index: (view.data_ptr(), view.stride()) for index, view in self.views.items()
        }
        self._references = count_storage_references(self.memory)

    def holds(self, index: int, gradient: Tensor) -> bool:
        """Return whether the gradient is in its place here. `.data = ...` and `.to(...)` move it
        elsewhere."""
        return (gradient.data_ptr(), gradient.stride()) == self._places[index]

    def has_outside_references(self) -> bool:
        """Return whether a user holds a gradient of an earlier pass that is no parameter's `.grad`
        any more."""
        if (extra := count_storage_references(self.memory) - self._references) == 0:
            return False
        gradients = ((index, parameter.grad) for index, parameter in self.by_index.items())
        return extra > sum(
            gradient is not None and self.holds(index, gradient) for index, gradient in gradients
        )

    # The interface of torch's communication hooks (`torch.distributed.GradBucket`)

    def buffer(self) -> Tensor:
        """Return the memory, (n,), or what a hook has put in its place."""
        return self.sent

    def set_buffer(self, vector: Tensor) -> None:
        """Send another vector in this pass, (n,), for example in another dtype."""
        self.sent = vector

    def gradients(self) -> list[Tensor]:
        """Return the gradients, views of the buffer."""
        parts = self.sent.split([parameter.numel() for parameter in self.by_index.values()])
        pairs = zip(parts, self.by_index.values(), strict=True)
        return [
            part.as_strided(parameter.shape, strides_like(parameter)) for part, parameter in pairs
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are averaged."""
        return list(self.by_index.values())

    def index(self) -> int:
        """Return the number of the bucket, from 0 up."""
        return self._number

    def is_last(self) -> bool:
        """Return whether it is the last bucket of a pass."""
        return self._is_last

    def store(self, average: torch.futures.Future[Any]) -> None:
        """Wait for a hook's result, and copy it into the memory."""
        # torch's hooks return a list of one tensor, or the tensor.
        result = average.wait()
        self.memory.copy_(result[0] if isinstance(result, list) else result)

"""How a wrapper's gradients are summed over ranks: by torch.distributed, or by labkit's own all-reduce.

    torch            dist.all_reduce, which gloo and NCCL carry out in the background
    auto, shared, point_to_point    labkit.parallel.collectives over that transport; on a CPU a thread carries it out

Both know two calls: `run` returns when a tensor is averaged, `start` returns at once what waits for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_reduce
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.transport.select_transport import CHOICES

TORCH = "torch"
AVERAGES = (TORCH, *CHOICES)


class Average(ABC):
    """Sums or averages dense vectors over the ranks of a group, in place, in the order of the calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.in_use: dict[str, tuple[str, str]] = {}
        """By device: what carries the vectors, and why it is not shared memory, where that was possible to ask for."""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copied wrapper averages over the same ranks, and sends over the same transport

    @abstractmethod
    def start(self, vector: Tensor, op: str) -> Wait:
        """Begin; call what is returned to wait for the end. `op` is "sum" or "mean"."""

    def run(self, vector: Tensor, op: str) -> None:
        """Return when it is done."""
        self.start(vector, op)()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what will be averaged again and again. A collective."""
        return torch.empty(numel, dtype=dtype, device=device)


def average_named(name: str, group: dist.ProcessGroup | None, like: Sequence[Tensor]) -> Average:
    """For tensors of the types and devices of these, in an order that is the same on every rank. A collective.

    ValueError for a name that is none of `AVERAGES`, and for types that labkit's all-reduce does not know.
    """
    if name not in AVERAGES:
        raise ValueError(f"all_reduce must be one of {', '.join(AVERAGES)}; got {name!r}")
    if name == TORCH:
        return TorchAverage(group)
    if others := {str(tensor.dtype) for tensor in like} - {str(dtype) for dtype in FLOAT_TYPES}:
        raise ValueError(f"labkit's all-reduce adds real floating-point numbers only, got {', '.join(sorted(others))}")
    return OwnAverage(group, name, dict.fromkeys(tensor.device for tensor in like))


class TorchAverage(Average):
    """`dist.all_reduce`."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise TypeError("a wrapper with a process group of its own holds other processes: save its `module`")
        return TorchAverage, (None,)

    def start(self, vector: Tensor, op: str) -> Wait:
        if op == "mean":
            vector.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return work.wait


class OwnAverage(Average):
    """labkit's `all_reduce`, in the background over transports that nobody else uses: a `Channel` a device."""

    def __init__(self, group: dist.ProcessGroup | None, preference: str, devices: Iterable[torch.device]) -> None:
        super().__init__(group)
        self.channels = {device: Channel(group, device, preference) for device in devices}
        self.in_use = {str(device): channel.in_use for device, channel in self.channels.items()}

    def __reduce__(self) -> str:
        raise TypeError("a wrapper with labkit's all-reduce holds memory of other processes: save its `module`")

    def start(self, vector: Tensor, op: str) -> Wait:
        channel = self.channels[vector.device]
        return channel.start(partial(channel.call, all_reduce, vector, op))

    def run(self, vector: Tensor, op: str) -> None:
        self.channels[vector.device].call(all_reduce, vector, op)  # without a thread

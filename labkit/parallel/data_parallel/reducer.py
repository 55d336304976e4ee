"""The collective that averages a wrapper's gradients.

torch            dist.all_reduce, which gloo and NCCL run in the background
auto, shared, point_to_point    labkit's all-reduce over that transport, on a CPU in a thread
"""

from collections.abc import Iterable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_reduce
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.transport import CHOICES

TORCH = "torch"


class Reducer:
    """Reduces dense vectors over the ranks of a group, in place, in the order of the calls."""

    def __init__(self, name: str, group: dist.ProcessGroup | None, tensors: Iterable[Tensor]) -> None:
        """Connect the devices of `tensors`. A collective."""
        self.group = group
        devices = () if name == TORCH else dict.fromkeys(tensor.device for tensor in tensors)
        self.channels = {device: Channel(group, device, name) for device in devices}

    def start(self, vector: Tensor, op: str = "mean") -> Wait:
        """Start a mean or a "sum"; return a function that waits for its end."""
        if channel := self.channels.get(vector.device):
            return channel.start(partial(channel.call, all_reduce, vector, op))
        if op == "mean":
            vector.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return work.wait

    def average(self, vector: Tensor) -> None:
        """Replace the vector by its mean over ranks."""
        if channel := self.channels.get(vector.device):
            channel.call(all_reduce, vector)  # without the thread
        else:
            self.start(vector)()


def check_reducer(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError for an unknown name, and for dtypes that labkit's all-reduce does not add."""
    if name not in (names := (TORCH, *CHOICES)):
        raise ValueError(f"all_reduce must be one of {', '.join(names)}; got {name!r}")
    if name != TORCH and (others := {str(tensor.dtype) for tensor in tensors} - {str(dtype) for dtype in FLOAT_TYPES}):
        raise ValueError(f"labkit's all-reduce adds real floating-point numbers only, got {', '.join(sorted(others))}")

"""What sums a wrapper's gradients over ranks.

torch            dist.all_reduce, which gloo and NCCL carry out in the background
auto, shared, point_to_point    labkit's all-reduce over that transport, on a CPU in a thread
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_reduce
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.transport.select_transport import CHOICES

TORCH = "torch"
REDUCERS = (TORCH, *CHOICES)


class TorchReducer:
    """Averages ("mean") or sums dense vectors over the ranks of a group, in place, by `dist.all_reduce`."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, vector: Tensor, op: str) -> Wait:
        """Begin, and return what waits for the end. Vectors are reduced in the order of the calls."""
        if op == "mean":
            vector.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(vector, group=self.group, async_op=True)
        assert work is not None, "async_op=True returns the work"
        return work.wait

    def run(self, vector: Tensor, op: str) -> None:
        """Return when it is done."""
        self.start(vector, op)()


class LabkitReducer(TorchReducer):
    """The same by labkit's `all_reduce` in the background, over a separate transport per device."""

    def __init__(self, group: dist.ProcessGroup | None, preference: str, devices: Iterable[torch.device]) -> None:
        super().__init__(group)
        self.channels = {device: Channel(group, device, preference) for device in devices}

    def start(self, vector: Tensor, op: str) -> Wait:
        channel = self.channels[vector.device]
        return channel.start(partial(channel.call, all_reduce, vector, op))

    def run(self, vector: Tensor, op: str) -> None:
        self.channels[vector.device].call(all_reduce, vector, op)  # without a thread


def make_reducer(name: str, group: dist.ProcessGroup | None, tensors: Iterable[Tensor]) -> TorchReducer:
    """Return one of `REDUCERS` for vectors of these tensors' dtypes and devices. A collective."""
    return (
        TorchReducer(group) if name == TORCH else LabkitReducer(group, name, dict.fromkeys(t.device for t in tensors))
    )


def check_reducer(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise ValueError for a name that is none of `REDUCERS`, and for dtypes that labkit's all-reduce does not add."""
    if name not in REDUCERS:
        raise ValueError(f"all_reduce must be one of {', '.join(REDUCERS)}; got {name!r}")
    if name != TORCH and (others := {str(tensor.dtype) for tensor in tensors} - {str(dtype) for dtype in FLOAT_TYPES}):
        raise ValueError(f"labkit's all-reduce adds real floating-point numbers only, got {', '.join(sorted(others))}")

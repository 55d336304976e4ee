"""What every collective does before its first message and after its last: checks, a vector to work on, its pieces."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from labkit.parallel.transport.choice import AUTO, find_transport, member_group
from labkit.parallel.transport.contract import Transport
from labkit.parallel.uncompiled import uncompiled

FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPS = ("mean", "sum")
DENSE = torch.strided


class InPlace:
    """The tensor as a vector the transport can move, (n,), and the transport.

    The vector is the tensor's own memory if that is contiguous and where the transport works; otherwise a copy, copied
    back at the end. Autograd sees only that the tensor has changed: whoever keeps it for a backward pass is told.
    """

    # A class, not a generator: at 4 KB every 10 us of Python count, and code that runs once a call is never warm.
    __slots__ = ("copy_to", "transport", "vector")

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup | None, transport: str | Transport) -> None:
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("expected a tensor made outside of torch.inference_mode, or a call inside of it")
        self.transport = find_transport(group, tensor.device, transport)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self.copy_to: torch.Tensor | None = None
        if tensor.is_contiguous() and tensor.device == self.transport.device:
            self.vector = tensor if tensor.dim() == 1 else tensor.view(-1)
        else:
            if not tensor.is_contiguous():
                _check_no_overlap(tensor)
            self.copy_to = tensor
            self.vector = tensor.to(self.transport.device).contiguous().view(-1)

    def __enter__(self) -> Any:
        return self.vector, self.transport

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        torch.autograd.graph.increment_version(self.vector)  # messages are written past torch
        if kind is None and self.copy_to is not None:
            self.copy_to.copy_(self.vector.view(self.copy_to.shape))


class Reduction(InPlace):
    """The same, and what to divide the sum by."""

    __slots__ = ("divisor",)

    def __init__(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str, transport: str | Transport
    ) -> None:
        if op not in OPS or tensor.dtype not in FLOAT_TYPES or tensor.layout is not DENSE:
            _refuse(tensor, op)
        super().__init__(tensor, group, transport)
        self.divisor = self.transport.world_size if op == "mean" else 1
        if self.divisor > 1 and tensor.dtype == torch.float16:
            self.vector.div_(self.divisor)
            self.divisor = 1

    def __enter__(self) -> tuple[torch.Tensor, Transport, int]:
        return self.vector, self.transport, self.divisor


class AllReduce(Protocol):
    """An all-reduce, in place."""

    def __call__(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        op: str = "mean",
        *,
        transport: str | Transport = AUTO,
    ) -> None: ...


Schedule = Callable[[torch.Tensor, Transport, int], None]
"""What an algorithm does with a vector, (n,), a transport, and what to divide the sum by: no checks."""

SCHEDULES: dict[str, Schedule] = {}


def all_reduce_by(name: str) -> Callable[[Schedule], AllReduce]:
    """Makes an `AllReduce` of a schedule, which is kept under that name."""

    def make(schedule: Schedule) -> AllReduce:
        def run(
            tensor: torch.Tensor,
            group: dist.ProcessGroup | None = None,
            op: str = "mean",
            *,
            transport: str | Transport = AUTO,
        ) -> None:
            with Reduction(tensor, group, op, transport) as (vector, via, divisor):
                schedule(vector, via, divisor)

        SCHEDULES[name] = schedule
        made = wraps(schedule)(uncompiled(run))
        made.__signature__ = signature(run)  # type: ignore[attr-defined]
        return made

    return make


def _refuse(tensor: torch.Tensor, op: str) -> NoReturn:
    if op not in OPS:
        raise ValueError(f'op must be "mean" or "sum", got {op!r}')
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_TYPES)
    raise ValueError(f"tensor must be dense, of one of the types {names}; got {tensor.dtype}, {tensor.layout}")


def _check_no_overlap(tensor: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("several elements of tensor share memory, as after expand(); clone() it first")


def check_shards(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    sizes: Sequence[int] | None,
    algorithm: str,
    algorithms: Container[str],
) -> Sequence[int]:
    """The sizes of the shards, or ValueError."""
    if algorithm != AUTO and algorithm not in algorithms:
        raise ValueError(f"algorithm must be {AUTO!r} or one of {algorithms}; got {algorithm!r}")
    if tensor.layout is not DENSE:
        raise ValueError(f"tensor must be dense, got {tensor.layout}")
    world_size, numel = member_group(group).size(), tensor.numel()
    if sizes is None:
        return even_sizes(numel, world_size)
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != numel:
        raise ValueError(
            f"sizes must be those of {world_size} shards, 0 or more elements each, {numel} together; got {list(sizes)}"
        )
    return sizes


def check_into(into: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
    """ValueError unless it can hold a shard of the tensor of that many elements."""
    expected = ((size,), tensor.dtype, tensor.device, True)
    if (tuple(into.shape), into.dtype, into.device, into.is_contiguous()) != expected:
        raise ValueError(
            f"into must be a contiguous vector of {size} elements, {tensor.dtype} on {tensor.device}, got "
            f"{tuple(into.shape)}, {into.dtype} on {into.device}"
        )
    if into.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and _meet(into, tensor):
        raise ValueError("into must not share elements with the tensor, which travels while into is written")


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the ranges of memory do that two tensors of one storage lie in."""
    (start, end), (others_start, others_end) = (
        (t.storage_offset(), t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        for t in (one, other)
    )
    return one.numel() > 0 < other.numel() and start <= others_end and others_start <= end


def even_sizes(numel: int, world_size: int) -> list[int]:
    """Elements by rank, as even as possible, the longer ones first: what `tensor_split` makes."""
    size, longer = divmod(numel, world_size)
    return [size + 1] * longer + [size] * (world_size - longer)


def cut(shards: Sequence[torch.Tensor], via: Transport) -> list[tuple[torch.Tensor, ...]]:
    """Each shard in as many pieces as the longest needs."""
    number = -(-max([shard.nbytes for shard in shards]) // via.piece_bytes)
    if number < 2:
        return [(shard,) for shard in shards]
    return [shard.split_with_sizes(even_sizes(len(shard), number)) for shard in shards]

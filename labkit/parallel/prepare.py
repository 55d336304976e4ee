"""Before a collective's first message and after its last: check the tensor, flatten it, cut it, copy it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.traffic import count_traffic
from labkit.parallel.transport import AUTO, find_transport
from labkit.parallel.transport.base import Transport, checksum

FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPS = ("mean", "sum")
Function = TypeVar("Function", bound=Callable[..., None])


def collective(function: Function) -> Function:
    """Tell other ranks when a call of this collective is over, or refused: those that still wait for it raise."""

    @disable_compile
    @wraps(function)
    def call(tensor: Any, group: Any = None, *args: Any, transport: str | Transport = AUTO, **options: Any) -> None:
        via = find_transport(group, tensor.device, transport)
        try:
            function(tensor, group, *args, transport=via, **options)
        finally:
            via.end_call()

    return cast("Function", call)


class InPlace:
    """Context of a collective: (vector, transport), the tensor as a contiguous vector, (n,).

    The vector shares the tensor's memory if the tensor is contiguous and on the transport's device. Otherwise it is a
    copy, which is copied back at the end. The tensor's version counter is raised: using it in an older graph raises.
    """

    # A class, not a generator: at 4 KB every 10 us of Python count.
    __slots__ = ("copy_to", "transport", "vector")

    def __init__(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        transport: str | Transport,
        name: str,
        by: str,
        op: str | None = None,
    ) -> None:
        """`name` and `by` are the collective and its algorithm; all ranks call with one `op`, if there is one."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor must be dense, got {tensor.layout}")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("expected a tensor made outside of torch.inference_mode, or a call inside of it")
        # Views that are negated or conjugated when they are read have other numbers in memory.
        is_contiguous = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        if not is_contiguous and any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError("several elements of tensor share memory, as after expand(); clone() it first")
        selected = find_transport(group, tensor.device, transport)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self.copy_to: torch.Tensor | None = None
        if is_contiguous and tensor.device == selected.device:
            # One element may have any stride.
            self.vector = tensor if tensor.dim() == 1 < tensor.numel() else tensor.as_strided((tensor.numel(),), (1,))
        else:
            self.copy_to = tensor
            self.vector = tensor.to(selected.device).resolve_neg().resolve_conj().contiguous().view(-1)
        if op is not None:
            selected.call_checksum = checksum(name, by, op, self.vector.numel(), self.vector.dtype)
        self.transport = count_traffic(selected, name, by, (self.vector,))

    def __enter__(self) -> Any:
        return self.vector, self.transport

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        torch.autograd.graph.increment_version(self.vector)  # the transport wrote to it without torch
        if kind is None and self.copy_to is not None:
            self.copy_to.copy_(self.vector.view(self.copy_to.shape))


class Reduction(InPlace):
    """Context of a sum or mean: (vector, transport, divisor). float16 is divided first, so that it cannot overflow."""

    __slots__ = ("divisor",)

    def __init__(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: str,
        transport: str | Transport,
        by: str,
        name: str = "all_reduce",
    ) -> None:
        if op not in OPS:
            raise ValueError(f'op must be "mean" or "sum", got {op!r}')
        if tensor.dtype not in FLOAT_TYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_TYPES)
            raise ValueError(f"tensor must be of one of the dtypes {names}; got {tensor.dtype}")
        super().__init__(tensor, group, transport, name, by, op)
        self.divisor = self.transport.world_size if op == "mean" else 1
        if self.divisor > 1 and tensor.dtype == torch.float16:
            self.vector.div_(self.divisor)
            self.divisor = 1

    def __enter__(self) -> tuple[torch.Tensor, Transport, int]:
        return self.vector, self.transport, self.divisor


def check_into(into: torch.Tensor, tensor: torch.Tensor, size: int) -> None:
    """Raise ValueError unless `into` can hold a shard of `size` elements of the tensor."""
    expected = ((size,), tensor.dtype, tensor.device, True)
    if (tuple(into.shape), into.dtype, into.device, into.is_contiguous()) != expected:
        raise ValueError(
            f"into must be a contiguous vector of {size} elements, {tensor.dtype} on {tensor.device}, got "
            f"{tuple(into.shape)}, {into.dtype} on {into.device}"
        )
    if into.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and size:
        raise ValueError("into must not share memory with the tensor, which travels while into is written")


def shard_sizes(numel: int, world_size: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the elements of each rank's shard: `sizes` if they fit, else p equal ones as if the vector were padded.

    Without padding the last shards are shorter, or empty. Raises ValueError for `sizes` that do not fit.
    """
    if sizes is None:
        size = -(-numel // world_size)
        return [max(0, min(size, numel - rank * size)) for rank in range(world_size)]
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != numel:
        raise ValueError(f"sizes must be {world_size} lengths of 0 or more, {numel} together; got {list(sizes)}")
    return list(sizes)


def cut(shards: Sequence[torch.Tensor], transport: Transport, depth: int) -> list[list[torch.Tensor]]:
    """Cut every shard into as many pieces as the longest needs with `depth` of them in flight."""
    longest, n_bytes = max([shard.nbytes for shard in shards]), transport.piece_bytes(depth)
    if longest <= n_bytes:  # the usual case, and for short vectors every microsecond counts
        return [[shard] for shard in shards]
    length = n_bytes // shards[0].itemsize
    number = -(-longest // (length * shards[0].itemsize))
    return [[shard[i * length : (i + 1) * length] for i in range(number)] for shard in shards]

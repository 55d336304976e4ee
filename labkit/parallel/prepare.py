"""A collective around its algorithm: check the tensor, flatten it, run, copy the result back, count
the call.

`disable_compile` hides what communicates from torch, which must neither trace nor replay it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version

from labkit.parallel.traffic import Call
from labkit.parallel.transport import AUTO, Group, TransportLike, find_transport
from labkit.parallel.transport.base import Transport, checksum
from labkit.torch_private import (
    current_dispatch_mode,
    is_in_dispatch_mode,
    skip_in_compiler,
    without_dispatch_mode,
)

FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPS = ("mean", "sum")
P = ParamSpec("P")
R = TypeVar("R")
# Works on a contiguous vector, (n,), in place, by `Call.run`; the integer divides sums.
Algorithm = Callable[[torch.Tensor, Call, int], None]


class AllReduce(Protocol):
    """Sum or mean over the ranks of a group, in place."""

    def __call__(
        self,
        tensor: torch.Tensor,
        group: Group = None,
        op: str = "mean",
        *,
        transport: TransportLike = AUTO,
    ) -> None: ...


def make_all_reduce(algorithm: Algorithm) -> AllReduce:
    """Make an all-reduce of an algorithm, a function `<name>_all_reduce(vector, call, divisor)`."""
    # Part of the checksum by which ranks that run other algorithms raise, through shared memory.
    names = ("all_reduce", algorithm.__name__.removesuffix("_all_reduce"))

    def all_reduce(
        tensor: torch.Tensor,
        group: Group = None,
        op: str = "mean",
        *,
        transport: TransportLike = AUTO,
    ) -> None:
        run_collective(names, algorithm, tensor, group, op, transport)

    # for help(), in place of the algorithm's
    vars(all_reduce)["__signature__"] = signature(all_reduce)
    return disable_compile(functools.wraps(algorithm)(all_reduce))


def run_collective(
    names: tuple[str, str],
    algorithm: Algorithm,
    tensor: torch.Tensor,
    group: Group,
    op: str | None,
    transport: TransportLike,
    check: Callable[[Transport], None] | None = None,
) -> None:
    """Run an algorithm on a tensor, in place. `names` of collective and algorithm; `op` None:
    nothing is added.

    float16 is divided before it is added, so that a mean cannot overflow. The tensor's version
    counter is raised: using it in an older graph raises. The end of a call is counted, even of one
    that is refused here or by `check`: ranks that still wait for its messages raise.
    """
    transport = find_transport(group, tensor.device, transport)
    try:
        if op is not None and op not in OPS:
            raise ValueError(f'op must be "mean" or "sum", got {op!r}')
        if op is not None and tensor.dtype not in FLOAT_TYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_TYPES)
            raise ValueError(f"tensor must be of one of the dtypes {expected}; got {tensor.dtype}")
        vector, original = as_vector(tensor, transport.device)
        if check is not None:
            check(transport)
        divisor = transport.world_size if op == "mean" else 1
        if divisor > 1 and vector.dtype == torch.float16:
            vector.div_(divisor)
            divisor = 1
        description = checksum(*names, op, vector.numel(), vector.dtype)
        increment_version(vector)  # the transport writes to it without torch
        algorithm(vector, Call(transport, *names, (vector,), description), divisor)
        if original is not None:
            original.copy_(vector.view(original.shape))
    finally:
        transport.end_call()


def as_vector(
    tensor: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensor as a contiguous vector on a device, (n,), and the tensor to copy it back to
    if it is a copy."""
    if type(tensor) is not torch.Tensor:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's part
    if tensor.layout is not torch.strided:
        raise ValueError(f"tensor must be dense, got {tensor.layout}")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "expected a tensor made outside of torch.inference_mode, or a call inside of it"
        )
    # Views that are negated or conjugated when they are read have other numbers in memory.
    is_contiguous = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
    if not is_contiguous and any(
        n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            "several elements of tensor share memory, as after expand(); clone() it first"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not is_contiguous or tensor.device != device:
        return tensor.to(device).resolve_neg().resolve_conj().contiguous().view(-1), tensor
    # One element may have any stride.
    return (
        tensor if tensor.dim() == 1 < tensor.numel() else tensor.as_strided((tensor.numel(),), (1,))
    ), None


def strides_like(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the tensor's if it is dense, else contiguous ones."""
    return torch.empty_like(tensor, device="meta").stride()


def check_into(into: torch.Tensor | None, tensor: torch.Tensor, transport: Transport) -> None:
    """Raise ValueError unless `into`, if there is one, can hold this rank's shard of the tensor."""
    if into is None:
        return
    size = shard_sizes(tensor.numel(), transport.world_size)[transport.rank]
    expected = ((size,), tensor.dtype, tensor.device, True)
    if (tuple(into.shape), into.dtype, into.device, into.is_contiguous()) != expected:
        raise ValueError(
            f"into must be a contiguous vector of {size} elements, {tensor.dtype} on"
            f" {tensor.device}, got {tuple(into.shape)}, {into.dtype} on {into.device}"
        )
    if into.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and size:
        raise ValueError(
            "into must not share memory with the tensor, which travels while into is written"
        )


def shard_sizes(numel: int, world_size: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Return the elements of each rank's shard: `sizes` if they fit, else p equal ones as if the
    vector were padded.

    Without padding the last shards are shorter, or empty. Raises ValueError for `sizes` that do not
    fit.
    """
    if sizes is None:
        size = -(-numel // world_size)
        return [max(0, min(size, numel - rank * size)) for rank in range(world_size)]
    if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != numel:
        raise ValueError(
            f"sizes must be {world_size} lengths of 0 or more, {numel} together; got {list(sizes)}"
        )
    return list(sizes)


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the function from selective checkpoints and, if the program has imported it, from the
    compiler."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # A selective checkpoint keeps what operators return, and refuses it once the next message
        # has overwritten it.
        if (
            is_in_dispatch_mode()
            and type(current_dispatch_mode()).__module__ == "torch.utils.checkpoint"
        ):
            with without_dispatch_mode():
                return call(*args, **kwargs)
        if "torch._dynamo" not in sys.modules:  # nothing is compiled; to import it takes seconds
            return function(*args, **kwargs)
        if not disabled:
            # else it is compiled for each function and number of arguments
            skip_in_compiler(call)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call

"""The way in which ranks agree before they communicate: all go on, or all raise one error.

Ranks that call different collectives, or pass tensors of different shapes, hang or mix up their
numbers. So ranks first compare a description of what they are about to do:

    def describe():
        if bucket_mb <= 0:
            raise ValueError(f"expected bucket_mb > 0, got {bucket_mb}")
        return {"bucket_mb": bucket_mb, "weight": describe_parameter(model.weight)}

    agree_once("model", describe, group)

`describe` returns what must be equal, by name, or raises the reason why this rank cannot go on.
A rank that has a reason raises it; all others raise ValueError with the number of that rank and its
reason, or with the first name that differs. Every rank has then left the call, so a program that
catches the error can go on.

Which of the two functions:

``agree_once``       when a model is wrapped, an optimizer made, a setting changed. Takes
                     milliseconds: descriptions of any length travel as text.
``agree_per_pass``   in a forward or backward pass, for what can change between two passes. Takes
                     one all-gather of a few integers; text travels only if there is an error.

Both are collectives of the group, between CPUs: they never wait for a GPU, and work in groups of
NCCL, too. Only `describe_values` waits for one, once per shape. `messages.gather_json` is for
values that may differ.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.failures import check_group, describe_error
from labkit.parallel.messages import cpu_group, gather_json
from labkit.parallel.prepare import disable_compile, strides_like
from labkit.parallel.transport import AUTO, Group, Transport, find_transport, member_group

Describe = Callable[[], Mapping[str, object]]

# Seconds after which a rank that waits for others says so.
PATIENCE_S = 1.5

_CPU = torch.device("cpu")
# By group: shapes and dtypes of tensors on a GPU that were described, and if ranks have agreed.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = (
    weakref.WeakKeyDictionary()
)
_BIT_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class OtherRankRefused(ValueError):
    """Another rank cannot go on; the message has its number and its reason."""

    is_consequence = True  # a group of ranks that failed shows the other rank's error instead


@disable_compile
def agree_once(subject: str, describe: Describe, group: Group = None) -> None:
    """Compare the ranks' descriptions of `subject`, such as "model", as text. A collective.

    Raises ValueError on all ranks if descriptions differ. If `describe` raises on some ranks, their
    error is raised there, and ValueError with the reason of the first of them on the others.
    """
    check_group(group)
    description, problem = _call(describe)
    _compare(subject, description, problem, group)


@disable_compile
def agree_per_pass(
    subject: str,
    describe: Describe,
    group: Group = None,
    *,
    numbers: Sequence[int] = (),
    transport: str | Transport = AUTO,
) -> list[list[int]]:
    """Compare the ranks' descriptions of `subject` by a checksum. A collective, errors as above.

    Returns the int64 `numbers` of every rank, as many on each, by rank: they may differ.
    `transport`: between CPUs, as for `find_transport`.
    """
    check_group(group)
    description, problem = _call(describe)
    connection = find_transport(cpu_group(member_group(group)), _CPU, transport)
    # All in one message: the checksum travels even if this rank has a problem, so nobody waits.
    rows = torch.zeros(connection.world_size, 2 + len(numbers), dtype=torch.int64, device=_CPU)
    row = [problem is not None, _checksum(description), *numbers]
    rows[connection.rank] = torch.tensor(row, device=_CPU)
    all_gather(rows, transport=connection)
    by_rank = rows.tolist()
    if any(row[:2] != [False, by_rank[0][1]] for row in by_rank):
        # All ranks see the same rows, so all are here: now time does not matter, but the text does.
        _compare(subject, description, problem, group)
    # From here on all ranks know that shapes agree: values on a GPU are described now.
    compared = _compared.get(member_group(group), {})
    compared.update(dict.fromkeys(compared, True))
    return [row[2:] for row in by_rank]


@disable_compile
def wait_for_ranks(call: str, group: Group = None, arrival: dist.Work | None = None) -> None:
    """Wait until every rank of the group makes this call, and warn if one does not. A collective.

    `arrival`: a collective of the call itself, to wait for; None: a barrier.

    For collectives that programs may make on rank 0 alone, such as gathering a model or logging a
    norm: the other ranks are then elsewhere, or done, and cannot be told. Others may only be late,
    so the wait goes on.
    """
    if arrival is None:
        arrival = dist.barrier(member_group(group), async_op=True)
    start = time.monotonic()
    while not arrival.is_completed():
        if time.monotonic() - start > PATIENCE_S:
            warnings.warn(
                f"{call} waits for other ranks: every rank of the group must call it, not one",
                stacklevel=3,
            )
            break
        # Short: every call waits up to this long after the last rank has come.
        time.sleep(0.0001)
    arrival.wait()


def describe_parameter(tensor: Tensor) -> str:
    """Describe a parameter or buffer without its values: shape, dtype, a gradient's strides."""
    trained = f"trained, strides {strides_like(tensor)}" if tensor.requires_grad else "not trained"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {trained}"


def describe_values(tensor: Tensor, group: Group = None) -> str:
    """Describe shape, dtype and values, by a checksum, for an agreement of the group.

    To read values waits for a GPU, so there they are described until ranks have agreed on a tensor
    of this shape and dtype, which finds ranks that read different data. The checksum depends on the
    order of integers, or of rows of floats.
    """
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.is_cuda:
        compared = _compared.setdefault(member_group(group), {})
        if compared.setdefault(kind, False):
            return kind
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if values.is_floating_point():
        values = values.view(_BIT_PATTERNS[values.itemsize])
        if values.dim() > 1:
            # The weights below would take eight times the memory of a batch of images.
            values = values.flatten(1).sum(1)
    flat = values.flatten().to(torch.int64)
    checksum = int((flat * torch.arange(1, flat.numel() + 1, device=flat.device)).sum())
    return f"{kind} {checksum}"


def _call(describe: Describe) -> tuple[dict[str, str], Exception | None]:
    """Return what `describe` returns, as text, and what it raises."""
    try:
        return {name: str(value) for name, value in describe().items()}, None
    except Exception as problem:
        return {}, problem


def _checksum(description: Mapping[str, str]) -> int:
    """Return a number of 56 bits, the same in every process (unlike `hash`)."""
    # In order: ranks with the same names in another order would send other tensors.
    text = json.dumps([*description.items()])
    # Seven bytes: eight may not fit an int64, which has a sign.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _compare(
    subject: str, description: Mapping[str, str], problem: Exception | None, group: Group
) -> None:
    reason = None if problem is None else describe_error(problem)
    by_rank = gather_json([reason, [*description.items()]], member_group(group))
    if problem is not None:
        raise problem
    for rank, (other_reason, _) in enumerate(by_rank):
        if other_reason is not None:
            raise OtherRankRefused(f"rank {rank}: {other_reason}")
    first = by_rank[0][1]
    for rank, (_, items) in enumerate(by_rank):
        if items != first:
            raise ValueError(
                f"expected the same {subject} on every rank; {_difference(first, rank, items)}"
            )


def _difference(first: list[list[str]], rank: int, items: list[list[str]]) -> str:
    """Return what rank 0 has first that another rank has not, or has differently."""
    here, there = dict(first), dict(items)
    for name in [*here, *there]:
        if name not in there:
            return f"rank 0 has {name}, rank {rank} does not"
        if name not in here:
            return f"rank {rank} has {name}, rank 0 does not"
        if here[name] != there[name]:
            return f"rank 0 has {name}={here[name]}, rank {rank} has {there[name]}"
    return f"rank {rank} has the same names as rank 0 in another order"

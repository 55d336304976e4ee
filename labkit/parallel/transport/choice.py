"""Which transport serves a tensor: found once for a group, a device and a preference, and kept as long as the group."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.parallel.transport.contract import POINT_TO_POINT, SHARED, TRANSPORTS, Transport
from labkit.parallel.transport.mapping import SharedMemoryUnavailable
from labkit.parallel.transport.process_group import TAG, BatchTransport, StreamTransport
from labkit.parallel.transport.shared import SharedTransport

AUTO = "auto"
"""Shared memory where all ranks of the group can share it, else point to point."""
CHOICES = (AUTO, *TRANSPORTS)

_HOST = torch.device("cpu")
_DEFAULT_TIMEOUT_S = 1800.0


class Found(NamedTuple):
    """A transport, and why it is not shared memory, or no other, if it is not."""

    transport: Transport
    why: str


# Per group, because scratch memory outlives a call; weak, because it may not outlive the group.
_found: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.device, str], Found]] = (
    weakref.WeakKeyDictionary()
)
_NOTHING: dict[tuple[torch.device, str], Found] = {}
_own_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def find_transport(
    group: dist.ProcessGroup | None, device: torch.device, preference: str | Transport = AUTO
) -> Transport:
    """The transport that serves tensors on `device` in `group` (all ranks, if None). The first call is a collective.

    `preference` is one of "auto", "point_to_point" and "shared", or a transport, which is then the answer.

    NCCL serves CUDA tensors in place. Everything else goes through CPU memory: gloo's send and recv know no other.

    Raises:
        ValueError: no process group, this rank is not in it, it has no backend for the device, a `preference` of
            another name, or "shared" where the ranks cannot share memory.
    """
    if not isinstance(preference, str):
        return preference
    # Nearly every call asks again; the rest of the way would cost more than a short message.
    member = dist.group.WORLD if group is None else group
    if isinstance(member, dist.ProcessGroup):
        found = _found.get(member, _NOTHING).get((device, preference))
        if found is not None:
            return found.transport
    return _find(group, device, preference).transport


def own_transport(group: dist.ProcessGroup | None, device: torch.device, preference: str = AUTO) -> Found:
    """One more transport, for a caller whose messages may be under way at the same time as others of the group.

    Errors as `find_transport`. A collective.
    """
    group = member_group(group)
    _own_made[group] = number = _own_made.get(group, 0) + 1
    return _make(group, device, preference, {}, TAG + number)


def transport_in_use(
    group: dist.ProcessGroup | None = None, device: torch.device = _HOST, preference: str = AUTO
) -> tuple[str, str]:
    """The name of the transport that `preference` means in `group`, and why it is this one; empty for shared memory."""
    found = _find(group, device, preference)
    return found.transport.name, found.why


def group_transports(group: dist.ProcessGroup | None) -> set[Transport]:
    """The transports that all callers of `group` share, as far as they have been made."""
    return {found.transport for found in _found.get(member_group(group), {}).values()}


def empty_for_all_reduce(
    numel: int,
    dtype: torch.dtype,
    device: torch.device = _HOST,
    group: dist.ProcessGroup | None = None,
    preference: str | Transport = AUTO,
) -> torch.Tensor:
    """A vector, (numel,), that an all-reduce of `group` moves without copying it first. A collective, sizes alike.

    For buffers that are reduced again and again. What is short is copied always: messages up to 32 KiB, those that two
    ranks swap (`swaps.py`) up to 512 KiB in a group of two, what all show to all (`boards.py`) up to 192 KiB. Shared
    memory where the transport is that and there is enough of it, else, with a warning, a tensor like any other.
    """
    transport = find_transport(group, device, preference)
    if transport.device != device:
        return torch.empty(numel, dtype=dtype, device=device)
    return transport.empty(numel, dtype)


def _find(group: dist.ProcessGroup | None, device: torch.device, preference: str) -> Found:
    group = member_group(group)
    known = _found.get(group)
    if known is None:
        known = _found[group] = {}
    found = known.get((device, preference))
    if found is None:
        found = known[device, preference] = _make(group, device, preference, known, TAG)
    return found


def _make(
    group: dist.ProcessGroup,
    device: torch.device,
    preference: str,
    known: dict[tuple[torch.device, str], Found],
    tag: int,
) -> Found:
    if preference not in CHOICES:
        raise ValueError(f"transport must be one of {', '.join(CHOICES)}; got {preference!r}")
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(f"the process group has no backend for {device.type} tensors") from error
    if backend.name() == "nccl":
        if preference == SHARED:
            raise ValueError("shared memory serves CPU tensors; these are moved by NCCL")
        return Found(BatchTransport(group, device), "NCCL moves CUDA tensors")
    if preference == AUTO and group.size() == 1:
        return _found_in(known, group, POINT_TO_POINT, tag, "one rank alone sends nothing")
    if preference == POINT_TO_POINT:
        return _found_in(known, group, POINT_TO_POINT, tag, "asked for")
    try:
        return _found_in(known, group, SHARED, tag, "")
    except SharedMemoryUnavailable as error:
        if preference == SHARED:
            raise ValueError(f"the ranks of this group cannot share memory: {error}") from error
        return _found_in(known, group, POINT_TO_POINT, tag, str(error))


def _found_in(
    known: dict[tuple[torch.device, str], Found], group: dist.ProcessGroup, name: str, tag: int, why: str
) -> Found:
    """One transport of a kind serves all who ask for it, by name or because it is the best."""
    for found in known.values():
        if found.transport.name == name and found.transport.device == _HOST:
            return Found(found.transport, why)
    if name == POINT_TO_POINT:
        return Found(StreamTransport(group, tag), why)
    return Found(SharedTransport(group, _timeout_s(group)), why)


def _timeout_s(group: dist.ProcessGroup) -> float:
    options = getattr(group._get_backend(_HOST), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else _DEFAULT_TIMEOUT_S


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, that of all ranks for None; ValueError where there is none, and on a rank that is not in it."""
    if group is None:
        if not dist.is_initialized():
            raise ValueError("there is no process group: call torch.distributed.init_process_group first")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a process group that this rank belongs to, or None for all ranks; got {group!r}"
        )
    return group

"""How ranks exchange memory: the transport that serves a tensor, selected once per group, device
and preference.

Every algorithm of `collectives.py` is a list of rounds of transfers, which `Transport.run` carries
out (`base.py`): point to point by torch.distributed, between any machines, or through memory that
the ranks of a host share.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.transport.base import (
    POINT_TO_POINT,
    SHARED,
    TRANSPORTS,
    SharedMemoryUnavailable,
    Transfer,
    Transport,
)
from labkit.parallel.transport.point_to_point import TAG, BatchTransport, StreamTransport
from labkit.parallel.transport.shared_memory import SharedTransport

__all__ = ["POINT_TO_POINT", "SHARED", "TRANSPORTS", "Transfer", "Transport"]

# Shared memory if all ranks of the group can share it, else point to point.
AUTO = "auto"
CHOICES = (AUTO, *TRANSPORTS)
# None: all ranks.
Group = dist.ProcessGroup | None
# One of `CHOICES`, or a transport to use.
TransportLike = str | Transport

# Of a message that nobody sends.
ABORT_TAG = TAG - 1

_HOST = torch.device("cpu")
# By device and preference.
_Selections = dict[tuple[torch.device, str], Transport]

# Per group, because scratch memory outlives a call; weak, because it must not outlive the group.
_selections: weakref.WeakKeyDictionary[dist.ProcessGroup, _Selections] = weakref.WeakKeyDictionary()
# All that are in use, with those of channels.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[Transport]] = (
    weakref.WeakKeyDictionary()
)
# How many `make_separate_transport` has made.
_separate_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def find_transport(
    group: Group, device: torch.device, preference: TransportLike = AUTO
) -> Transport:
    """Return the transport for tensors on `device` in `group` (None: all ranks). The first call is
    a collective.

    `preference` is "auto", "point_to_point" or "shared"; a transport is returned as it is. NCCL
    serves CUDA tensors in place. Everything else goes through CPU memory: gloo's send and recv know
    no other.

    Raises ValueError without a process group, on a rank outside of it, if it has no backend for the
    device, for a `preference` of another name, and for "shared" if the ranks cannot share memory.
    """
    if not isinstance(preference, str):
        return preference
    members = member_group(group)
    selections = _selections.setdefault(members, {})
    transport = selections.get((device, preference))
    if transport is None:
        transport = _select(members, device, preference, selections, TAG)
        selections[device, preference] = _register(transport, members)
    return transport


def make_separate_transport(group: Group, device: torch.device, preference: str) -> Transport:
    """Make one more transport, for messages that may be in flight together with others of the
    group.

    Errors as `find_transport`. A collective.
    """
    group = member_group(group)
    # Another tag for each, the same on all ranks: messages in flight together are not mixed up.
    _separate_counts[group] = number = _separate_counts.get(group, 0) + 1
    return _register(_select(group, device, preference, {}, TAG + number), group)


def transport_in_use(
    group: Group = None, device: torch.device = _HOST, preference: str = AUTO
) -> tuple[str, str]:
    """Return the name of the transport that serves `group`, and the reason if it is not shared
    memory."""
    transport = find_transport(group, device, preference)
    return transport.name, transport.reason


def abort(group: dist.ProcessGroup) -> None:
    """Close this rank's connections, of CPU memory: ranks that wait for it raise, then others.

    From any thread. No message can be sent in the group afterwards.
    """
    for transport in [*_transports.get(group, ())]:
        transport.leave()
    backend: Any = group._get_backend(_HOST)
    # gloo cannot be aborted (torch 2.13), but where a wait is too long for the application, gloo
    # closes all connections of the group. It raises at once if the other rank has closed them.
    with suppress(RuntimeError):
        never = backend.recv([torch.empty(1)], (group.rank() + 1) % group.size(), ABORT_TAG)
        never.wait(timedelta(milliseconds=1))


def member_group(group: Group) -> dist.ProcessGroup:
    """Return the group, or all ranks for None; raise ValueError without one, and on a rank that is
    not in it."""
    if group is None and (group := dist.GroupMember.WORLD) is None:
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "group must be a process group that this rank belongs to, or None: all ranks; got"
            f" {group!r}"
        )
    return group


def _register(transport: Transport, group: dist.ProcessGroup) -> Transport:
    transport.store = group.get_group_store()
    _transports.setdefault(group, weakref.WeakSet()).add(transport)
    return transport


def _select(
    group: dist.ProcessGroup,
    device: torch.device,
    preference: str,
    selections: _Selections,
    tag: int,
) -> Transport:
    """Make the transport that serves the preference. A collective.

    `selections`: the group's transports so far; one that shares memory is returned again. `tag`: of
    messages point to point.
    """
    if preference not in CHOICES:
        raise ValueError(f"transport must be one of {', '.join(CHOICES)}; got {preference!r}")
    if _backend_name(group, device) == "nccl":
        if preference == SHARED:
            raise ValueError("shared memory serves CPU tensors; these are moved by NCCL")
        # Only "auto" may take NCCL's collectives: who requests messages wants to measure them.
        return BatchTransport(group, device, has_collectives=preference == AUTO)
    if preference == POINT_TO_POINT:
        return StreamTransport(group, tag, "requested")
    if preference == AUTO and group.size() == 1:
        return StreamTransport(group, tag, "one rank alone sends nothing")
    # One serves all devices: messages of a GPU go through CPU memory anyway.
    shared = [each for each in selections.values() if each.name == SHARED]
    try:
        return shared[0] if shared else SharedTransport(group)
    except SharedMemoryUnavailable as error:
        if preference == SHARED:
            raise ValueError(f"the ranks of this group cannot share memory: {error}") from error
        return StreamTransport(group, tag, str(error))


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(f"the process group has no backend for {device.type} tensors") from error
    return str(backend.name())

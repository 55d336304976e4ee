"""Hosts: which ranks share one, and which network interface leads to the others.

Two processes share a host if they run under one boot of one kernel and see the same processes and the same network.
Containers, and network namespaces with separate addresses, are hosts of their own: their ranks communicate over
the network.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_ANY_PORT = 9  # nothing is sent to it


@cache
def host_identity() -> str:
    """16 hex digits, the same for all processes of a host, others elsewhere."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text().strip())
    for kind in ("pid", "net"):
        namespace = Path("/proc/self/ns") / kind
        if namespace.exists():
            parts.append(str(namespace.stat().st_ino))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def label_hosts(ranks: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """Ranks by host, hosts in the order of their first rank, from (host name, `host_identity`) by rank.

    A name that several hosts have (containers, network namespaces) gets the beginning of the identity.
    """
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank, host in enumerate(ranks):
        hosts.setdefault(host, []).append(rank)
    names = [name for name, _ in hosts]
    return {
        name if names.count(name) == 1 else f"{name}-{identity[:4]}": members
        for (name, identity), members in hosts.items()
    }


def describe_hosts(hosts: dict[str, list[int]] | None) -> str:
    """The layout of a run's ranks in words."""
    if hosts is None:
        return "ranks started on one machine"
    return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {_span(ranks)} on {host}" for host, ranks in hosts.items())


def _span(ranks: list[int]) -> str:
    """0–7, or the ranks one by one if they are not neighbors."""
    neighbors = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if neighbors else ", ".join(map(str, ranks))


def choose_gloo_interface(store: Any, rank: int, world_size: int, ranks_here: int) -> str | None:
    """The network interface for gloo's sockets in this process, by name. Every rank of the job calls this.

    Left alone, gloo takes the address that the host's own name stands for. On many systems that is the loopback, and
    the hosts never find one another. GLOO_SOCKET_IFNAME is kept if it is set. The loopback is chosen if all ranks are
    on this machine; otherwise the interface that routes to the master address or, on a master whose name stands for
    its loopback, to a rank elsewhere. None leaves the choice to gloo.
    """
    setting = os.environ.get(GLOO_INTERFACE)
    if ranks_here == world_size:
        return setting or LOOPBACK
    address = source_address(os.environ["MASTER_ADDR"])
    store.set(f"labkit/address of rank {rank}", address)
    if setting:
        return setting
    if _is_loopback(address):
        addresses = [store.get(f"labkit/address of rank {other}").decode() for other in range(world_size)]
        elsewhere = [other for other in addresses if other and not _is_loopback(other)]
        address = source_address(elsewhere[0]) if elsewhere else ""
    return interface_with(address) if address and not _is_loopback(address) else None


def source_address(host: str) -> str:
    """The address from which this machine would reach `host`; "" if it has no way there. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_with(address: str) -> str | None:
    """The interface that carries an address of this machine, or None."""
    import psutil  # not for every rank that starts

    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return interface
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"

"""Which ranks share a host: found out, not assumed from their numbers.

Two processes share a host here if they run under one boot of one kernel and see the same processes and the same
network. So containers, and network namespaces with addresses of their own, are hosts of their own: what passes
between them is meant to pass over their network.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path


@cache
def host_identity() -> str:
    """The same 16 hex digits for all processes of a host, others elsewhere."""
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
        name if names.count(name) == 1 else f"{name}-{identity[:4]}": of_host
        for (name, identity), of_host in hosts.items()
    }


def describe_hosts(hosts: dict[str, list[int]] | None) -> str:
    """The layout of a run's ranks in words."""
    if hosts is None:
        return "ranks started on one machine"
    return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {_span(ranks)} on {host}" for host, ranks in hosts.items())


def _span(ranks: list[int]) -> str:
    """0–7, or the ranks one by one where they are not neighbors."""
    neighbors = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}–{ranks[-1]}" if neighbors else ", ".join(map(str, ranks))

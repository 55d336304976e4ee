"""Which network interface gloo's sockets are to use between the nodes of a job.

Left alone, gloo takes the address that the host's own name stands for. On many systems that is the loopback, and the
nodes never find one another. What does lead to the other nodes is the interface that routes to the master address.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import psutil

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ANY_PORT = 9  # nothing is sent to it


def choose_gloo_interface(store: Any, rank: int, world_size: int, ranks_here: int) -> str | None:
    """What GLOO_SOCKET_IFNAME is to be in this process. Every rank of the job calls this equally often.

    What it is already, if so. The loopback if all ranks are on this machine. Otherwise the interface that routes to
    the master address or, on a master whose name stands for its loopback, the one that routes to a rank elsewhere.
    None, and so left to gloo, if there is none.
    """
    set_already = os.environ.get(GLOO_INTERFACE)
    if ranks_here == world_size:
        return set_already or LOOPBACK
    own = source_address(os.environ["MASTER_ADDR"])
    store.set(f"labkit/address of rank {rank}", own)
    if set_already:
        return set_already
    if is_loopback(own):
        addresses = [store.get(f"labkit/address of rank {other}").decode() for other in range(world_size)]
        elsewhere = [address for address in addresses if address and not is_loopback(address)]
        own = source_address(elsewhere[0]) if elsewhere else ""
    return interface_of(own) if own and not is_loopback(own) else None


def source_address(host: str) -> str:
    """The address from which this machine would reach `host`; "" if it has no way there. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str | None:
    """The interface that carries an address of this machine, or None."""
    for interface, carried in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in carried):
            return interface
    return None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"

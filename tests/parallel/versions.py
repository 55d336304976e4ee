"""The two versions of the exchange through shared memory, alone and in one group."""

import os

import torch
import torch.distributed as dist

from labkit.parallel.core.build import COMPILED, PYTHON, VARIABLE
from labkit.parallel.transport import SHARED, find_transport
from labkit.parallel.transport.shared import SharedTransport

MIXED = "mixed"
DEFAULT = "default"  # the compiled one where there is one
VERSIONS = (COMPILED, PYTHON, MIXED)


def shared_transport(version: str) -> SharedTransport:
    """That of all ranks, which run this version; mixed: one or the other."""
    own = (COMPILED, PYTHON)[dist.get_rank() % 2] if version == MIXED else version
    if own != DEFAULT:
        os.environ[VARIABLE] = own
    transport = find_transport(None, torch.device("cpu"), SHARED)
    assert isinstance(transport, SharedTransport)
    if own != DEFAULT:
        assert bool(transport.why_python) == (own == PYTHON), transport.why_python
    return transport

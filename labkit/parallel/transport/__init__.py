"""How ranks exchange memory: the one operation, `run(steps)`, under every algorithm of `collectives.py`.

base.py               steps, and the contract between algorithms and transports
point_to_point.py     torch.distributed's send and recv, between any machines: gloo and NCCL
shared_memory.py      memory that all ranks of a host map (compiled: `shared_memory.cpp`, `build.py`)
select_transport.py   which of them serves a tensor
"""

from labkit.parallel.transport.base import POINT_TO_POINT, SHARED, TRANSPORTS
from labkit.parallel.transport.select_transport import (
    AUTO,
    find_transport,
    make_separate_transport,
    transport_in_use,
)

__all__ = [
    "AUTO",
    "POINT_TO_POINT",
    "SHARED",
    "TRANSPORTS",
    "find_transport",
    "make_separate_transport",
    "transport_in_use",
]

"""How ranks exchange memory: the one operation under every all-reduce of `collectives.py`.

An algorithm is a list of steps. A step sends a part of a vector to one rank and receives a part from another,
which is stored or added to what is there. `run` carries the steps out, several at a time where the algorithm
allows it, so that adding overlaps receiving. `show` lets every rank see what all have. Everything else is the
transport's: calls that cannot deadlock, scratch memory, what a message is. An algorithm is written once, and runs over
each of them:

    StreamTransport   gloo, CPU memory: each message is a call of its own, moved in the background
    BatchTransport    NCCL, CUDA memory: messages that wait for each other must be launched as one batch
    SharedTransport   ranks of one host: memory that all of them map, semaphores that say when it may be read

    contract.py        what a transport and an algorithm promise each other
    process_group.py   the two over torch.distributed, point to point, on any machines
    shared.py          the one over shared memory
    messages.py        its messages of any length, with a note for each
    swaps.py           its shortest way, for short messages that two ranks send each other
    boards.py          its shortest way from all to all, for what every rank shows the others
    signals.py         its semaphores by number
    mapping.py         memory that several ranks map
    peers.py           waiting for another rank, as long as it lives
    errors.py          what a rank says when it waits in vain
    semaphores.py      how one rank waits for another without a call to torch.distributed
    choice.py          which of them serves a tensor
"""

from labkit.parallel.transport.choice import AUTO, empty_for_all_reduce, find_transport, own_transport, transport_in_use
from labkit.parallel.transport.contract import POINT_TO_POINT, SHARED, TRANSPORTS

__all__ = [
    "AUTO",
    "POINT_TO_POINT",
    "SHARED",
    "TRANSPORTS",
    "empty_for_all_reduce",
    "find_transport",
    "own_transport",
    "transport_in_use",
]

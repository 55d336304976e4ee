"""A cable between two TUN devices, with a delay and a rate in each direction, for kernels without `tc netem`.

python wire.py FD FD DELAY_S BYTES_PER_S

A virtual machine wakes 50 to 100 us late from a timer, and from an idle processor. So processors are kept from idling,
which Linux offers to those who measure latency, and the last moment before a packet is due is not slept through.
"""

import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

AWAKE_S = 100e-6


def carry(ends, delay_s, bytes_per_s):
    """Move packets for ever: each is sent once those before it are, and arrives one delay later."""
    other = dict(zip(ends, reversed(ends), strict=True))
    under_way = {end: deque() for end in ends}  # (when it arrives at this end, packet)
    free_at = dict.fromkeys(ends, 0.0)
    for end in ends:
        os.set_blocking(end, False)
    while True:
        for end, packets in under_way.items():
            while packets and packets[0][0] <= time.monotonic():
                with suppress(BlockingIOError):  # a full queue loses packets, as elsewhere
                    os.write(end, packets.popleft()[1])
        due = min((packets[0][0] for packets in under_way.values() if packets), default=time.monotonic() + 1)
        readable, _, _ = select.select(ends, [], [], max(0.0, due - AWAKE_S - time.monotonic()))
        now = time.monotonic()
        for end in readable:
            with suppress(BlockingIOError):
                packet = os.read(end, 65536)
                free_at[end] = max(free_at[end], now) + len(packet) / bytes_per_s
                under_way[other[end]].append((free_at[end] + delay_s, packet))


def keep_processors_awake():
    """Until this process ends, which closes the file, processors wait for work without going to sleep."""
    with suppress(OSError):
        os.write(os.open("/dev/cpu_dma_latency", os.O_WRONLY), struct.pack("i", 0))


if __name__ == "__main__":
    keep_processors_awake()
    with suppress(OSError):  # on time also when the machine is busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    first, second = (int(text) for text in sys.argv[1:3])
    carry([first, second], float(sys.argv[3]), float(sys.argv[4]))

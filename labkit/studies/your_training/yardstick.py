"""A fixed piece of work, by which runs of one training at different hours are compared.

A virtual machine's cores may be half as fast ten minutes later, for a training and for this alike.
NumPy and Python do it on one core: a new torch must not hide its own change.
"""

import timeit

import numpy as np

CALLS = 25
# With the loop below, some 4 ms per call.
LENGTH = 200_000


def time_yardstick() -> list[float]:
    """Return seconds of each of some calls, a tenth of a second together."""
    values = np.linspace(0.5, 1.5, LENGTH)

    def work() -> float:
        total = 0.0
        for number in range(5_000):
            total += number * 1e-3
        return total + float(np.sqrt(values * values + 1.0).sum())

    work()
    return timeit.repeat(work, number=1, repeat=CALLS)

"""Which all-reduce algorithm suits a size, a number of ranks and a transport.

Measured by benchmarks/against_torch.py on 2 cores under SCHED_BATCH: medians of the time over that
of gloo's `dist.all_reduce`, point to point.

    bytes per rank   algorithm             2 ranks   4 ranks   8 ranks   16 ranks
    391 KiB          recursive doubling    0.87      0.67      0.54      0.41
                     butterfly             1.0       0.85      0.74      0.73
                     ring                  0.97      1.0       0.92      0.95
    1 MiB            recursive doubling    1.0       0.91      1.0       1.2
                     butterfly             1.0       0.84      0.90      0.78
                     ring                  1.0       0.94      1.0       1.1
    100 MiB          butterfly             0.96      1.0
                     ring                  0.92      1.0

Through shared memory, the time of recursive doubling over that of the butterfly: with 2 ranks 0.87
at 256 KiB, 0.96 at 1 MiB, 0.97 at 4 MiB; with 4 ranks 0.83 at 64 KiB, 1.05 at 256 KiB.
"""

from labkit.parallel.transport import POINT_TO_POINT, SHARED

# The longest vectors for which an algorithm is the best one.
DOUBLING_BYTES = 512 << 10
DOUBLING_SHARED_BYTES = 192 << 10
DOUBLING_SHARED_PAIR_BYTES = 2 << 20
BUTTERFLY_BYTES = 16 << 20


def select_algorithm(n_bytes: int, world_size: int, transport: str = POINT_TO_POINT) -> str:
    """Return the name of the algorithm for `n_bytes` per rank.

    Few messages if short, few bytes if long.
    """
    if world_size < 1 or n_bytes < 0:
        raise ValueError(
            f"expected n_bytes >= 0 and world_size >= 1, got {n_bytes} and {world_size}"
        )
    doubling_bytes = DOUBLING_BYTES
    if transport == SHARED:
        doubling_bytes = DOUBLING_SHARED_PAIR_BYTES if world_size == 2 else DOUBLING_SHARED_BYTES
    if n_bytes <= doubling_bytes:
        return "recursive_doubling"
    if transport == SHARED or n_bytes <= BUTTERFLY_BYTES:
        return "butterfly"
    return "ring"

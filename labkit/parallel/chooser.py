"""Which algorithm reduces or gathers how many bytes on how many ranks, by measurement."""

from labkit.parallel.transport.contract import POINT_TO_POINT, SHARED

# Where one algorithm overtakes another: time over gloo's `dist.all_reduce`, medians, 2 cores, SCHED_BATCH, from
# benchmarks/all_reduce_against_gloo.py (RD recursive doubling, D direct exchange, R ring, HD halving-doubling, 1S
# one-shot).
#
#     ranks     2                       4                        8                        16
#     64 KiB    RD .58  D .94  R .96    RD .45  D .75  R .91     RD .33  D .73  R .94     RD .33  D .74  R 1.2
#     256 KiB   RD .64  HD .94 R .93    RD .59  HD .91 R 1.0     RD .45  HD .66 R .95     RD .48  HD .53 R 1.0
#     391 KiB   RD .87  D 1.0   R .97    RD .67  D .85  R 1.0     RD .54  D .74  R .92     RD .41  D .73  R .95
#     1 MiB     RD 1.0  D 1.0  R 1.0    RD .91  D .84  R .94     RD 1.0  D .90  R 1.0     RD 1.2  D .78  R 1.1
#     10 MiB    HD .94  D .91  R .95    HD 1.3  D 1.0  R 1.1     HD 1.3  D 1.2  R 1.1     HD 1.2  D 1.1  R 1.2
#     100 MiB   HD .98  D .96  R .92    HD 1.2  D 1.0  R 1.0
SHORT_BYTES = 512 << 10
MIDDLE_BYTES = 16 << 20
# Over shared memory a message costs little, and waiting much where ranks are more than cores: one-shot waits once. The
# compiled core; in Python, one-shot would stay ahead up to 512 KiB, but ranks that run either must choose alike.
#
#     ranks     3                         4                         8
#     64 KiB                              1S .26  RD .27  D .31     1S .26  RD .29  D .31
#     128 KiB   1S .33          D .32     1S .29          D .32
#     192 KiB                             1S .34          D .34
#     256 KiB   1S .39          D .37     1S .37  RD .37  D .34     1S .36  RD .40  D .35
#     512 KiB   1S .46          D .39     1S .44  RD .46  D .34     1S .45  RD .49  D .37
#     1 MiB                               1S .49  RD .50  D .39     1S .60  RD .60  D .40
SHARED_SHOT_BYTES = 192 << 10
# Between two ranks there is one message in a row either way, and a swap is the shortest. Direct exchange moves no more
# bytes, and half as many at a time, which stay in the cache. Compiled (384 and 512 KiB would be swapped in less time):
#
#     2 ranks   128 KiB   256 KiB   384 KiB   512 KiB   1 MiB
#     RD        .20       .21       .29       .31       .41
#     D         .30       .29       .37       .38       .41
SHARED_SWAP_BYTES = 256 << 10


def choose_algorithm(n_bytes: int, world_size: int, transport: str = POINT_TO_POINT) -> str:
    """Name of the algorithm for `n_bytes` a rank: few messages if short, few bytes if long.

    Point to point, the borders hardly move with the number of ranks: what a step more costs, all ranks sharing the
    cores pay alike.
    """
    if world_size < 1 or n_bytes < 0:
        raise ValueError(f"expected n_bytes >= 0 and world_size >= 1, got {n_bytes} and {world_size}")
    if transport == SHARED:
        if world_size > 2:
            return "one_shot" if n_bytes <= SHARED_SHOT_BYTES else "butterfly"
        return "recursive_doubling" if n_bytes <= SHARED_SWAP_BYTES else "butterfly"
    if n_bytes <= SHORT_BYTES:
        return "recursive_doubling"
    return "butterfly" if n_bytes <= MIDDLE_BYTES else "ring"


def choose_phase_algorithm(n_bytes: int, world_size: int, transport: str = POINT_TO_POINT) -> str:
    """The same for a reduce-scatter or an all-gather of `n_bytes` in all shards together."""
    algorithm = choose_algorithm(n_bytes, world_size, transport)
    return "halving_doubling" if algorithm == "recursive_doubling" else algorithm

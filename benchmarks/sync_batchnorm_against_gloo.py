"""Time of labkit's SyncBatchNorm over plain BatchNorm plus twice two bare gloo all-reduces; float32, CPU.

    python benchmarks/sync_batchnorm_against_gloo.py                  # the promise: exits 1 if it is missed
    python benchmarks/sync_batchnorm_against_gloo.py --worlds 2,4 --batches 32,64 --features 128,1024

The promise, of the default ranks and sizes only: forward and backward of the layer take no longer than those of torch's
BatchNorm on the rank's own rows plus twice the time of two all-reduces of the bytes that the layer sends. Any others
are timed and not judged, and the exit is 0. All take turns on ranks under SCHED_BATCH, one thread each: a barrier
before every sample, which is the mean of `--calls` calls; the slowest rank counts; medians of the repeats. Results are
checked first. On a busy machine the ratio means little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.launch import run_ranks
from labkit.studies.sync_batchnorm.alternatives import ALL_REDUCES, ALONE, COLLECTIVES, LOCAL, OWN
from labkit.studies.sync_batchnorm.worker import LAYER, SyncBatchNormPoint, measure_point

NAMES = (OWN, LOCAL, ALL_REDUCES, COLLECTIVES, ALONE)
PROMISED = (2, 64, 1024)  # ranks, rows of all ranks, features
WARMUP = 5


def measure(batch: int, features: int, calls: int, repeats: int) -> dict[str, float]:
    """On every rank: median seconds of forward and backward together, of the slowest rank, by alternative."""
    point = SyncBatchNormPoint(
        world_size=dist.get_world_size(),
        backend="gloo",
        sweep=LAYER,
        batch=batch,
        features=features,
        alternatives=NAMES,
        calls=calls,
        warmup=WARMUP,
        repeats=repeats,
    )
    medians = {}
    for row in measure_point(point):
        if row["gate"] != "ok":
            raise ArithmeticError(f"{row['alternative']} is {row['gate']}: a wrong answer gets no time")
        if row.get("phase") == "both":
            slowest = torch.tensor(row["seconds"], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            medians[row["alternative"]] = statistics.median(slowest.tolist())
    return medians


def main() -> int:
    options = _parse()
    has_missed, has_checked = False, False
    for world_size in options.worlds:
        for batch in options.batches:
            for features in options.features:
                sizes = (batch, features, options.calls, options.repeats)
                medians = run_ranks(measure, *sizes, world_size=world_size, threads=1, timeout_s=600)[0]
                ratio = medians[OWN] / (medians[LOCAL] + 2 * medians[ALL_REDUCES])
                is_promised = (world_size, batch, features) == PROMISED
                has_missed |= is_promised and ratio > 1
                has_checked |= is_promised
                print(_line((world_size, batch, features), medians, ratio, is_promised), flush=True)
    if not has_checked:
        ranks, batch, features = PROMISED
        print(f"The promise was not checked: it is of {ranks} ranks, {batch} x {features}, and that was not measured.")
    return int(has_missed)


def _line(setting: tuple[int, int, int], medians: dict[str, float], ratio: float, is_promised: bool) -> str:
    verdict = f"  promised 1: {'kept' if ratio <= 1 else 'MISSED'}" if is_promised else "  not promised"
    times: dict[str, Any] = {name: f"{seconds * 1e3:.3f}" for name, seconds in medians.items()}
    return (
        f"{setting[0]:3} ranks {setting[1]:4} x {setting[2]:<5} layer {times[OWN]} ms   plain {times[LOCAL]}   "
        f"two all-reduces {times[ALL_REDUCES]}   ratio {ratio:.2f}{verdict}   "
        f"(own collectives {times[COLLECTIVES]}, layer without them {times[ALONE]})"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks, batch, features = PROMISED
    parser.add_argument("--worlds", type=_whole_numbers, default=[ranks], help="numbers of ranks: 2,4")
    parser.add_argument("--batches", type=_whole_numbers, default=[batch], help="rows of all ranks together: 32,64")
    parser.add_argument("--features", type=_whole_numbers, default=[features], help="128,1024")
    parser.add_argument("--calls", type=int, default=1, help="of which a sample is the mean")
    parser.add_argument("--repeats", type=int, default=200)
    return parser.parse_args()


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

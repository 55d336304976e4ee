"""Time of labkit's reduce-scatter and all-gather over time of gloo's own, on this machine; float32, CPU.

    python benchmarks/phases_against_gloo.py                      # the promises: exits 1 if one is missed
    python benchmarks/phases_against_gloo.py --registered         # tensors that lie in shared memory already
    python benchmarks/phases_against_gloo.py --algorithms ring,butterfly --worlds 3,4 --sizes 4096,1048576

As `all_reduce_against_gloo.py`: the algorithms take turns with gloo, shuffled every round, under SCHED_BATCH, one
thread a rank; the slowest rank counts; medians. Sizes are those of all shards together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.clock import start_together, turn_order
from labkit.parallel.collectives import all_gather, reduce_scatter
from labkit.parallel.launch import run_ranks
from labkit.parallel.phases import REDUCE_SCATTERS
from labkit.parallel.transport import AUTO, SHARED, TRANSPORTS, empty_for_all_reduce
from labkit.studies.all_reduce.phases import torchs_all_gather, torchs_reduce_scatter

GLOO = "gloo"
SIZES = (1 << 20, 10 << 20, 100 << 20)
# The largest ratio promised through shared memory on 2 cores, for each size, to two ranks.
PROMISES = {"reduce_scatter": (0.35, 0.15, 0.15), "all_gather": (0.25, 0.25, 0.25)}
WARMUP = 3
GLOOS = {"reduce_scatter": torchs_reduce_scatter, "all_gather": torchs_all_gather}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: per collective, size and algorithm, median seconds of it and of gloo, and their ratio."""
    rows = []
    for collective in PROMISES:
        for n_bytes in options.sizes:
            seconds = _interleave(collective, n_bytes, options)
            for name in options.algorithms:
                times = {"own_s": seconds[name], "gloo_s": seconds[GLOO], "ratio": seconds[name] / seconds[GLOO]}
                rows.append({"collective": collective, "algorithm": name, "n_bytes": n_bytes, **times})
    return rows


def _interleave(collective: str, n_bytes: int, options: argparse.Namespace) -> dict[str, float]:
    own: Callable[..., None] = reduce_scatter if collective == "reduce_scatter" else all_gather
    settings = {"op": "sum"} if collective == "reduce_scatter" else {}
    calls: dict[str, Callable[[torch.Tensor], Any]] = {GLOO: GLOOS[collective]}
    calls |= {
        name: partial(own, algorithm=name, transport=options.transport, **settings) for name in options.algorithms
    }
    numel = n_bytes // 4 // dist.get_world_size() * dist.get_world_size()
    tensors = {name: torch.ones(numel) for name in calls}
    if options.registered:
        tensors |= {name: empty_for_all_reduce(numel, torch.float32, preference=options.transport) for name in calls}
    samples_s: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARMUP + options.repeats):
        for name in turn_order(calls, number, seed=n_bytes):
            samples_s[name].append(_time(collective, calls[name], tensors[name]))
    return {name: _median_of_slowest(samples_s[name][WARMUP:]) for name in calls}


def _time(collective: str, call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    p, shard = dist.get_world_size(), tensor.chunk(dist.get_world_size())[dist.get_rank()]
    tensor.fill_(1.0 if collective == "reduce_scatter" else -1.0)
    shard.fill_(1.0)
    start_together()
    start = time.perf_counter()
    call(tensor)
    elapsed_s = time.perf_counter() - start
    right = (shard == p) if collective == "reduce_scatter" else (tensor == 1)
    assert right.all(), "a wrong answer gets no time"
    return elapsed_s


def _median_of_slowest(samples_s: list[float]) -> float:
    slowest = torch.tensor(samples_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main() -> int:
    options = _parse()
    has_missed = False
    for world_size in options.worlds:
        rows = run_ranks(measure, options, world_size=world_size, threads=1, timeout_s=1800)[0]
        for row in rows:
            promises = dict(zip(SIZES, PROMISES[row["collective"]], strict=True))
            is_promised = (world_size, row["algorithm"], options.transport) == (2, AUTO, SHARED)
            promise = promises.get(row["n_bytes"]) if is_promised else None
            has_missed |= promise is not None and row["ratio"] > promise
            print(_line(world_size, row, promise), flush=True)
    return int(has_missed)


def _line(world_size: int, row: dict[str, Any], promise: float | None) -> str:
    verdict = "" if promise is None else f"  promised {promise}: {'kept' if row['ratio'] <= promise else 'MISSED'}"
    times = f"own {row['own_s'] * 1e3:9.3f} ms   gloo {row['gloo_s'] * 1e3:9.3f} ms"
    return (
        f"{world_size:3} ranks {row['collective']:14} {row['n_bytes'] / 1024:9.0f} KiB  {row['algorithm']:16} {times}"
        f"   ratio {row['ratio']:.2f}{verdict}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, default=SHARED)
    parser.add_argument("--registered", action="store_true", help="tensors that lie in shared memory already")
    parser.add_argument("--worlds", type=_whole_numbers, default=[2, 4], help="numbers of ranks: 2,4")
    parser.add_argument("--sizes", type=_whole_numbers, default=list(SIZES), help="bytes: 4096,65536")
    parser.add_argument(
        "--algorithms", type=_names, default=[AUTO], help=f'"all", {AUTO}, {", ".join(REDUCE_SCATTERS)}'
    )
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = [*REDUCE_SCATTERS, AUTO] if text == "all" else text.split(",")
    for name in names:
        if name not in REDUCE_SCATTERS and name != AUTO:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join([*REDUCE_SCATTERS, AUTO])}")
    return names


if __name__ == "__main__":
    sys.exit(main())

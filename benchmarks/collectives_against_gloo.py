"""Time of labkit's collectives over time of gloo's, on this machine; float32, CPU. Exits 1 if a bound is missed.

    python benchmarks/collectives_against_gloo.py                                  # all-reduce, on 2 and 4 ranks
    python benchmarks/collectives_against_gloo.py --collective reduce_scatter      # or all_gather
    python benchmarks/collectives_against_gloo.py --transport point_to_point
    python benchmarks/collectives_against_gloo.py --algorithms all                 # for the borders in select_algorithm
    python benchmarks/collectives_against_gloo.py --in-a-row 10                    # calls one right after the other
    python benchmarks/collectives_against_gloo.py --worlds 8,16 --sizes 4096,1048576

Alternatives take turns with gloo, shuffled every round, on ranks under SCHED_BATCH, one thread each. All ranks begin a
turn at one moment; the slowest rank counts; medians of the repeats. A turn is one call, as in a training step: after
other work, with the code of the call out of the caches. `--in-a-row` is kinder to Python. A copy of 64 MB by all ranks
at once says how fast memory is at the moment. On a busy machine the ratios mean little.
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
from labkit.parallel.collectives import ALGORITHMS, all_gather, all_reduce, reduce_scatter
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import POINT_TO_POINT, SHARED, TRANSPORTS

AUTO, GLOO = "auto", "gloo"
SIZES = (4 << 10, 64 << 10, 1 << 20, 10 << 20, 100 << 20)
# (collective, transport) -> ranks -> the largest ratio on two quiet cores, for each of SIZES
BOUNDS = {
    ("all_reduce", POINT_TO_POINT): {2: (0.5, 0.7, 0.9, 1.1, 1.1), 4: (0.5, 0.7, 0.9, 1.1, 1.1)},
    ("all_reduce", SHARED): {2: (0.2, 0.2, 0.35, 0.3, 0.3), 4: (0.25, 0.25, 0.45, 0.45, 0.4)},
    ("reduce_scatter", SHARED): {2: (0.35,) * 3 + (0.2,) * 2},
    ("all_gather", SHARED): {2: (0.3,) * 5},
}
WARMUP = 3
COPY_BYTES = 64 << 20
Call = Callable[[torch.Tensor], Any]
# Newer versions of torch warn of the older names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank: for each size and algorithm, median seconds per call of it and of gloo."""
    rows = []
    for n_bytes in options.sizes:
        calls = {GLOO: _gloo(options.collective), **{name: _labkit(name, options) for name in options.algorithms}}
        tensors = {name: torch.ones(n_bytes // 4 // dist.get_world_size() * dist.get_world_size()) for name in calls}
        samples_s: dict[str, list[float]] = {name: [] for name in calls}
        start, repeats = time.perf_counter(), WARMUP
        for number in range(1000):
            if number == WARMUP:
                repeats = _agree_on_repeats((time.perf_counter() - start) / WARMUP, options.budget_s * len(calls))
            if number >= WARMUP + repeats:
                break
            for name in turn_order(calls, number, seed=n_bytes):
                samples_s[name].append(_time(calls[name], tensors[name], options))
        medians_s = {name: _median_over_slowest(samples_s[name][WARMUP:]) for name in calls}
        rows += [
            {"algorithm": name, "n_bytes": n_bytes, "labkit_s": medians_s[name], "gloo_s": medians_s[GLOO]}
            for name in options.algorithms
        ]
    return rows


def _labkit(name: str, options: argparse.Namespace) -> Call:
    if options.collective == "all_gather":
        return partial(all_gather, transport=options.transport)
    if options.collective == "reduce_scatter":
        return partial(reduce_scatter, op="sum", transport=options.transport)
    return partial(all_reduce if name == AUTO else ALGORITHMS[name], op="sum", transport=options.transport)


def _gloo(collective: str) -> Call:
    if collective == "all_gather":
        return lambda tensor: _all_gather(tensor, _own_shard(tensor))
    if collective == "reduce_scatter":
        return lambda tensor: _reduce_scatter(_own_shard(tensor), tensor)
    return dist.all_reduce


def _own_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _agree_on_repeats(round_s: float, budget_s: float) -> int:
    repeats = torch.tensor([min(400, max(7, int(budget_s / round_s)))])
    dist.broadcast(repeats, 0)
    return int(repeats)


def _time(call: Call, tensor: torch.Tensor, options: argparse.Namespace) -> float:
    tensor.fill_(1.0)
    start_together()
    start = time.perf_counter()
    for _ in range(options.in_a_row):
        call(tensor)
    elapsed_s = time.perf_counter() - start
    expected = 1 if options.collective == "all_gather" else dist.get_world_size() ** options.in_a_row
    part = tensor if options.collective == "all_reduce" else _own_shard(tensor)
    assert torch.allclose(part[-1], torch.tensor(float(expected))), "a wrong answer gets no time"
    return elapsed_s / options.in_a_row


def _median_over_slowest(samples_s: list[float]) -> float:
    slowest = torch.tensor(samples_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def copy_bandwidth() -> float:
    """Return bytes per second of a copy that all ranks make at once."""
    source, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)
    samples_s = []
    for _ in range(5):
        start_together()
        start = time.perf_counter()
        target.copy_(source)
        samples_s.append(time.perf_counter() - start)
    return COPY_BYTES / _median_over_slowest(samples_s)


def main() -> int:
    options = _parse()
    has_missed = False
    for world_size in options.worlds:
        bounds = dict(
            zip(SIZES, BOUNDS.get((options.collective, options.transport), {}).get(world_size, ()), strict=False)
        )
        bandwidth = run_ranks(copy_bandwidth, world_size=world_size, threads=1)[0]
        print(f"{world_size} ranks copy {bandwidth / 1e9:.1f} GB/s each", flush=True)
        for row in run_ranks(measure, options, world_size=world_size, threads=1, timeout_s=1800)[0]:
            ratio, bound = row["labkit_s"] / row["gloo_s"], bounds.get(row["n_bytes"])
            has_bound = bound is not None and row["algorithm"] == AUTO
            has_missed |= has_bound and ratio > bound
            verdict = f"  at most {bound}: {'met' if ratio <= bound else 'MISSED'}" if has_bound else ""
            times = f"labkit {row['labkit_s'] * 1e3:9.3f} ms   gloo {row['gloo_s'] * 1e3:9.3f} ms"
            size = f"{row['n_bytes'] / 1024:9.0f} KiB"
            print(
                f"{world_size:3} ranks {size}  {row['algorithm']:18} {times}   ratio {ratio:.2f}{verdict}", flush=True
            )
    return int(has_missed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective", choices=["all_reduce", "reduce_scatter", "all_gather"], default="all_reduce")
    parser.add_argument("--transport", choices=TRANSPORTS, default=SHARED)
    parser.add_argument(
        "--in-a-row", type=int, choices=range(1, 21), default=1, metavar="CALLS", help="1 to 20 per turn"
    )
    parser.add_argument("--worlds", type=_whole_numbers, default=[2, 4], help="numbers of ranks: 2,4")
    parser.add_argument("--sizes", type=_whole_numbers, default=list(SIZES), help="bytes: 4096,65536")
    parser.add_argument("--algorithms", type=_names, default=[AUTO], help=f'"all", {AUTO}, {", ".join(ALGORITHMS)}')
    parser.add_argument("--budget-s", type=float, default=1.5, help="seconds per size and algorithm")
    return parser.parse_args()


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = [*ALGORITHMS, AUTO] if text == "all" else text.split(",")
    for name in names:
        if name not in ALGORITHMS and name != AUTO:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join([*ALGORITHMS, AUTO])}")
    return names


if __name__ == "__main__":
    sys.exit(main())

"""Time of labkit's all-reduce over time of gloo's `dist.all_reduce`, on this machine; float32 sums, CPU.

    python benchmarks/all_reduce_against_gloo.py                      # the promises: exits 1 if one is missed
    python benchmarks/all_reduce_against_gloo.py --registered         # tensors that lie in shared memory already
    python benchmarks/all_reduce_against_gloo.py --in-a-row 10        # calls one right after the other
    python benchmarks/all_reduce_against_gloo.py --transport point_to_point
    python benchmarks/all_reduce_against_gloo.py --algorithms all     # every algorithm, for the chooser's thresholds
    python benchmarks/all_reduce_against_gloo.py --worlds 8,16 --sizes 4096,1048576

The algorithms take turns with gloo, shuffled every round, on ranks under SCHED_BATCH, one thread each. All ranks
begin a turn at one moment; the slowest rank counts; medians of the repeats. Who takes part matters: what ran before
decides what is in the caches and which core a thread is on. On a busy machine the ratios mean little.

A turn is one call, as a training step makes it: after other work, with the code of the call out of the caches. With
`--in-a-row` it is several, and their mean, as collectives are measured most often. That is kinder to an algorithm in
Python, which takes a multiple of its time where it has not run for a while. The promises are for both.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.clock import start_together, turn_order
from labkit.parallel.collectives import ALGORITHMS, all_reduce
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import POINT_TO_POINT, SHARED, empty_for_all_reduce

CHOOSER = "chooser"
GLOO = "gloo"
SIZES = (4 << 10, 64 << 10, 1 << 20, 10 << 20, 100 << 20)
# transport -> ranks -> the largest ratio promised on 2 cores, for each size
PROMISES = {
    POINT_TO_POINT: {2: (0.5, 0.7, 0.9, 1.1, 1.1), 4: (0.5, 0.7, 0.9, 1.1, 1.1)},
    SHARED: {2: (0.2, 0.2, 0.35, 0.3, 0.3), 4: (0.25, 0.25, 0.45, 0.45, 0.4), 8: (0.6,) * 5},
}
WARMUP = 3


def measure(
    names: list[str], transport: str, sizes: list[int], budget_s: float, is_registered: bool, in_a_row: int
) -> list[dict[str, Any]]:
    """On every rank: for each size and algorithm, median seconds a call of it and of gloo, and their ratio."""
    rows = []
    for n_bytes in sizes:
        seconds = _interleave(names, transport, n_bytes, budget_s, is_registered, in_a_row)
        for name in names:
            times = {"own_s": seconds[name], "gloo_s": seconds[GLOO], "ratio": seconds[name] / seconds[GLOO]}
            rows.append({"algorithm": name, "n_bytes": n_bytes, **times})
    return rows


def _interleave(
    names: list[str], transport: str, n_bytes: int, budget_s: float, is_registered: bool, in_a_row: int
) -> dict[str, float]:
    calls = {GLOO: dist.all_reduce, **{name: _summing(name, transport) for name in names}}
    tensors = {name: torch.ones(n_bytes // 4) for name in calls}
    if is_registered:
        tensors |= {name: empty_for_all_reduce(n_bytes // 4, torch.float32, preference=transport) for name in names}
    samples_s: dict[str, list[float]] = {name: [] for name in calls}
    start, repeats = time.perf_counter(), WARMUP
    for number in range(1000):
        if number == WARMUP:
            repeats = _agree_on_repeats((time.perf_counter() - start) / WARMUP, budget_s * len(calls))
        if number >= WARMUP + repeats:
            break
        for name in turn_order(calls, number, seed=n_bytes):
            samples_s[name].append(_time(calls[name], tensors[name], in_a_row))
    return {name: _median_of_slowest(samples_s[name][WARMUP:]) for name in calls}


def _summing(name: str, transport: str) -> Callable[[torch.Tensor], None]:
    return partial(all_reduce if name == CHOOSER else ALGORITHMS[name], op="sum", transport=transport)


def _agree_on_repeats(round_s: float, budget_s: float) -> int:
    repeats = torch.tensor([min(400, max(7, int(budget_s / round_s)))])
    dist.broadcast(repeats, 0)
    return int(repeats)


def _time(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor, in_a_row: int) -> float:
    tensor.fill_(1.0)
    start_together()
    start = time.perf_counter()
    for _ in range(in_a_row):
        call(tensor)
    elapsed_s = time.perf_counter() - start
    rel_tol = 0.0 if in_a_row == 1 else 1e-5  # one sum of ones is exact
    assert math.isclose(tensor[-1], dist.get_world_size() ** in_a_row, rel_tol=rel_tol), "a wrong answer gets no time"
    return elapsed_s / in_a_row


def _median_of_slowest(samples_s: list[float]) -> float:
    slowest = torch.tensor(samples_s, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def main() -> int:
    options = _parse()
    has_missed = False
    for world_size in options.worlds:
        results = run_ranks(
            measure,
            options.algorithms,
            options.transport,
            options.sizes,
            options.budget_s,
            options.registered,
            options.in_a_row,
            world_size=world_size,
            threads=1,
            timeout_s=1800,
        )
        for row in results[0]:
            promises = dict(zip(SIZES, PROMISES[options.transport].get(world_size, ()), strict=False))
            promise = promises.get(row["n_bytes"]) if row["algorithm"] == CHOOSER else None
            has_missed |= promise is not None and row["ratio"] > promise
            print(_line(world_size, row, promise), flush=True)
    return int(has_missed)


def _line(world_size: int, row: dict[str, Any], promise: float | None) -> str:
    verdict = "" if promise is None else f"  promised {promise}: {'kept' if row['ratio'] <= promise else 'MISSED'}"
    times = f"own {row['own_s'] * 1e3:9.3f} ms   gloo {row['gloo_s'] * 1e3:9.3f} ms"
    return (
        f"{world_size:3} ranks {row['n_bytes'] / 1024:9.0f} KiB  {row['algorithm']:18} {times}"
        f"   ratio {row['ratio']:.2f}{verdict}"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=list(PROMISES), default=SHARED)
    parser.add_argument("--registered", action="store_true", help="reduce tensors that lie in shared memory already")
    parser.add_argument("--in-a-row", type=int, choices=range(1, 21), default=1, metavar="CALLS", help="1 to 20 a turn")
    parser.add_argument("--worlds", type=_whole_numbers, help="numbers of ranks: 2,4; default: those with a promise")
    parser.add_argument("--sizes", type=_whole_numbers, default=list(SIZES), help="bytes: 4096,65536")
    parser.add_argument(
        "--algorithms", type=_names, default=[CHOOSER], help=f'"all", {CHOOSER}, {", ".join(ALGORITHMS)}'
    )
    parser.add_argument("--budget-s", type=float, default=1.5, help="seconds for a size and algorithm")
    options = parser.parse_args()
    options.worlds = options.worlds or list(PROMISES[options.transport])
    return options


def _whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = [*ALGORITHMS, CHOOSER] if text == "all" else text.split(",")
    for name in names:
        if name not in ALGORITHMS and name != CHOOSER:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join([*ALGORITHMS, CHOOSER])}")
    return names


if __name__ == "__main__":
    sys.exit(main())

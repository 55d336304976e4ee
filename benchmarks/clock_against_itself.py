"""How often labkit's clock and comparison see a difference between a function and itself; CPU. Exits 1 above 5%.

    python benchmarks/clock_against_itself.py [--tries 150] [--repeats 20] [--loads matmul exp all_reduce]

A try times one function under two names and a heavy one, taking turns, and compares the two. What ran before matters:
after the heavy one the caches hold something else. So each line also gives the false verdicts when the three always run
in one order, the heavy one first; if those are few as well, nothing has been shown. A busy machine makes all noisier.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.clock import time_interleaved, time_parts_interleaved
from labkit.bench.statistics import compare
from labkit.parallel.launch import run_ranks

MAX_FALSE = 0.05
# by name: the operation, elements of the small and of the large tensor, ranks
LOADS: dict[str, tuple[Callable[[torch.Tensor], Any], int, int, int]] = {
    "matmul": (lambda x: x.view(int(len(x) ** 0.5), -1).mm(x.view(int(len(x) ** 0.5), -1)), 64**2, 512**2, 1),
    "exp": (torch.exp, 2**16, 2**22, 1),
    "all_reduce": (dist.all_reduce, 2**14, 2**20, 2),
}


def false_verdicts(
    load: Callable[[torch.Tensor], Any], small: int, large: int, tries: int, repeats: int
) -> dict[str, list[float]]:
    """On every rank: the ratios that were called different, by whether turns were shuffled."""
    light, heavy = partial(load, torch.zeros(small)), partial(load, torch.zeros(large))
    actions = {"heavy": heavy, "first": light, "second": light}
    options: dict[str, Any] = {"warmup": 2, "repeats": repeats, "before": dist.barrier}
    ratios: dict[str, list[float]] = {"shuffled": [], "in one order": []}
    for number in range(tries):
        ratios["shuffled"] += _different(time_interleaved(actions, seed=number, **options))
        # the parts of a single alternative keep their order
        ratios["in one order"] += _different(time_parts_interleaved({"all": actions}, **options)["all"])
    return ratios


def _different(samples: dict[str, list[float]]) -> list[float]:
    slowest = torch.tensor([samples["first"], samples["second"]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    result = compare(*slowest.tolist(), interleaved=True)
    return [] if result.verdict == "no difference shown" else [result.ratio]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--tries", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    most = 0.0
    for name in options.loads:
        *load, world_size = LOADS[name]
        arguments = (*load, options.tries, options.repeats)
        ratios = run_ranks(false_verdicts, *arguments, world_size=world_size, threads=1, timeout_s=1800)[0]
        counts = [f"{how} {len(different)} of {options.tries}" for how, different in ratios.items()]
        print(f"{name:10} false verdicts: {'; '.join(counts)}", flush=True)
        most = max(most, len(ratios["shuffled"]) / options.tries)
    return int(most > MAX_FALSE)


if __name__ == "__main__":
    sys.exit(main())

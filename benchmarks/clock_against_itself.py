"""How often labkit's clock and comparison see a difference between a function and itself, beside a heavy one; CPU.

    python benchmarks/clock_against_itself.py                  # exits 1 above 5 % false verdicts
    python benchmarks/clock_against_itself.py --tries 40 --repeats 10

A try times one function under two names and a heavy one, all in turns, and compares the two. What ran before matters:
after the heavy one the caches hold something else. So each line also tells how many false verdicts there are if the
three always run in one order, the heavy one first; if those are few as well, nothing has been shown. On a busy machine
all of this is noisier.
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

FIRST, SECOND, HEAVY = "first", "second", "heavy"
MOST_FALSE = 0.05
WARMUP = 2

Action = Callable[[], Any]


def matmul() -> tuple[Action, Action]:
    """Products of matrices with 64 and with 512 rows."""
    small, large = torch.randn(64, 64), torch.randn(512, 512)
    return lambda: small @ small, lambda: large @ large


def exp() -> tuple[Action, Action]:
    """Of 256 KiB and of 16 MiB."""
    small, large = torch.randn(2**16), torch.randn(2**22)
    return small.exp, large.exp


def all_reduce() -> tuple[Action, Action]:
    """Of 64 KiB and of 4 MiB."""
    small, large = torch.zeros(2**14), torch.zeros(2**20)
    return partial(dist.all_reduce, small), partial(dist.all_reduce, large)


LOADS = {"matmul": (matmul, 1), "exp": (exp, 1), "all-reduce": (all_reduce, 2)}


def false_verdicts(load: Callable[[], tuple[Action, Action]], tries: int, repeats: int) -> dict[str, list[float]]:
    """On every rank: the ratios that were called different, by whether the turns were shuffled."""
    light, heavy = load()
    actions = {HEAVY: heavy, FIRST: light, SECOND: light}
    options: dict[str, Any] = {"warmup": WARMUP, "repeats": repeats, "before": dist.barrier}
    found: dict[str, list[float]] = {"shuffled": [], "in one order": []}
    for number in range(tries):
        samples = time_interleaved(actions, seed=number, **options)
        found["shuffled"] += _called_different(samples)
        # the parts of a single alternative keep their order
        samples = time_parts_interleaved({"all": actions}, **options)["all"]
        found["in one order"] += _called_different(samples)
    return found


def _called_different(samples: dict[str, list[float]]) -> list[float]:
    slowest = torch.tensor([samples[FIRST], samples[SECOND]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    result = compare(*slowest.tolist(), interleaved=True)
    return [] if result.verdict == "no difference shown" else [result.ratio]


def main() -> int:
    options = _parse()
    is_too_much = False
    for name in options.loads:
        load, world_size = LOADS[name]
        arguments = (load, options.tries, options.repeats)
        found = run_ranks(false_verdicts, *arguments, world_size=world_size, threads=1, timeout_s=1800)[0]
        is_too_much |= len(found["shuffled"]) > MOST_FALSE * options.tries
        counts = [f"{how} {_line(ratios, options.tries)}" for how, ratios in found.items()]
        print(f"{name:10} false verdicts: {'; '.join(counts)}", flush=True)
    return int(is_too_much)


def _line(ratios: list[float], tries: int) -> str:
    text = f"{len(ratios)} of {tries}"
    return f"{text} (ratios {min(ratios):.2f} to {max(ratios):.2f})" if ratios else text


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--tries", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Time of labkit's parts over that of torch's, in turns on this machine. Exits 1 if a bound is
missed.

    python benchmarks/against_torch.py     # all that run on a CPU: some ten minutes
    python benchmarks/against_torch.py --only all_reduce --worlds 2 4 8 --algorithms auto ring
    python benchmarks/against_torch.py --only data_parallel sharding --rounds 30

Alternatives take turns on ranks under SCHED_BATCH, one thread each, shuffled every round. Ranks
begin a turn at one moment, and the slowest counts. A ratio is labkit's time over torch's: below 1
labkit is faster. Bounds are for two quiet cores. Each line begins with the bandwidth of a copy of
64 MB by all ranks, since memory has slow phases.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW

from labkit.bench.check import gather_numbers
from labkit.bench.clock import time_interleaved
from labkit.bench.statistics import compare
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50
from labkit.parallel.collectives import ALGORITHMS, all_reduce
from labkit.parallel.data_parallel import wrap
from labkit.parallel.launch import run_ranks
from labkit.parallel.sync_batchnorm import SyncBatchNorm
from labkit.parallel.transport import POINT_TO_POINT, SHARED
from labkit.studies.shared.sharding_strategies import shard

TORCH = "torch"
COPY_BYTES = 64_000_000
SIZES = (4 << 10, 64 << 10, 1 << 20, 10 << 20, 100 << 20)
BUCKETS_MB = (None, 5.0, 25.0, 100.0)
ABOUT_100_MB = TransformerShape(d_model=384, d_ff=1536, n_layers=8, n_heads=6, vocabulary=8_000)
TOKENS = 64
# Until the moment at which ranks begin a turn: they leave a barrier up to 100 us apart.
MARGIN_S = 0.0005

Action = Callable[[], Any]
Times = dict[str, NDArray[np.float64]]


class Contest(NamedTuple):
    """Alternatives that take turns, and the bound of each pair (labkit's, torch's) to compare, or
    None."""

    title: str
    alternatives: Mapping[str, Action]
    pairs: Mapping[tuple[str, str], float | None]
    prepare: Callable[[str], Any] | None = None
    derive: Callable[[Times], Times] = lambda times: {}  # other times to compare


def all_reduces(options: argparse.Namespace) -> Iterator[Contest]:
    """Sums of float32, over both transports; bounds are for the algorithm that labkit picks."""
    world_size = dist.get_world_size()
    bounded = f"auto, {SHARED}"
    bounds = {2: (0.2, 0.2, 0.35, 0.3, 0.3), 4: (0.25, 0.25, 0.45, 0.45, 0.4)}.get(world_size, ())
    calls: dict[str, Callable[[Tensor], Any]] = {TORCH: dist.all_reduce}
    for name, transport in product(options.algorithms, (SHARED, POINT_TO_POINT)):
        calls[f"{name}, {transport}"] = partial(
            ALGORITHMS.get(name, all_reduce), op="sum", transport=transport
        )
    for n_bytes in options.sizes:
        tensors = {name: torch.ones(n_bytes // 4) for name in calls}
        for name, call in calls.items():
            call(tensors[name])
            assert (tensors[name] == world_size).all(), f"{name} is wrong"
        bound = dict(zip(SIZES, bounds, strict=False)).get(n_bytes)
        actions = {name: partial(call, tensors[name]) for name, call in calls.items()}
        pairs = {
            (name, TORCH): bound if name == bounded else None for name in calls if name != TORCH
        }
        yield Contest(
            f"all_reduce {n_bytes / 1024:.0f} KiB",
            actions,
            pairs,
            lambda name, each=tensors: each[name].fill_(1.0),
        )


def data_parallel(_: argparse.Namespace) -> Iterator[Contest]:
    """Backward passes of ResNet-50 under BucketedDDP and DistributedDataParallel by bucket size,
    best against best."""
    images = torch.randn(2, 3, 64, 64)
    labels = torch.randint(1000, (2,))
    bounds = {"bucketed": 1.0, "bucketed_shared": 0.75}
    wrappers = {
        f"{kind} {size or 'default'}": wrap(kind, ResNet50(), bucket_mb=size)
        for kind, size in product((*bounds, TORCH), BUCKETS_MB)
    }
    losses: dict[str, Tensor] = {}

    def forward(name: str) -> None:
        wrappers[name].zero_grad()
        losses[name] = nn.functional.cross_entropy(wrappers[name](images), labels)

    def backward(name: str) -> None:
        losses.pop(name).backward()

    def find_best(times: Times) -> Times:
        by_median = sorted(times, key=lambda name: -median(times[name]))
        # The fastest of a kind is the last, which a dictionary keeps.
        return {f"best {name.split()[0]}": times[name] for name in by_median}

    actions = {name: partial(backward, name) for name in wrappers}
    pairs = {(f"best {kind}", f"best {TORCH}"): bound for kind, bound in bounds.items()}
    yield Contest("backward, ResNet-50", actions, pairs, forward, find_best)


def sharding(_: argparse.Namespace) -> Iterator[Contest]:
    """Training steps with AdamW: labkit's stages over shared memory, FSDP also point to point;
    torch's over gloo."""
    tokens = torch.randint(ABOUT_100_MB.vocabulary, (1, TOKENS + 1))
    stages = dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), SHARED)
    stages |= dict.fromkeys(
        ("torch_ddp", "torch_zero1", "torch_zero3", "zero3, gloo"), POINT_TO_POINT
    )
    sharded = {}
    for name, transport in stages.items():
        model = Transformer(ABOUT_100_MB, context_length=TOKENS)
        sharded[name] = shard(name.split(",")[0], model, AdamW, transport=transport, lr=1e-4)

    def step(name: str) -> None:
        model, optimizer = sharded[name]
        language_model_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    pairs = {
        ("zero3", "torch_zero3"): 0.5,
        ("zero3, gloo", "torch_zero3"): 1.0,
        ("ddp", "torch_ddp"): None,
    }
    pairs |= {("zero1", "torch_zero1"): 0.9, ("zero2", "zero1"): 1.0}
    actions = {name: partial(step, name) for name in sharded}
    yield Contest(
        "training step, 100 MB", actions, pairs, lambda name: sharded[name][1].zero_grad()
    )


def sync_batchnorm(_: argparse.Namespace) -> Iterator[Contest]:
    """Forward and backward of 64 rows over all ranks by 1024 features.

    Compared with torch's BatchNorm on the rank's rows plus twice two all-reduces of the bytes that
    the layer sends.
    """
    rows = 64 // dist.get_world_size()
    features = 1024
    x = torch.randn(rows, features, requires_grad=True)
    grad = torch.randn(rows, features)
    layers = {"labkit": SyncBatchNorm(features), "plain": nn.BatchNorm1d(features)}
    messages = [torch.ones(3 * features + 1), torch.ones(2 * features)]

    def passes(layer: nn.Module) -> None:
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

    actions: dict[str, Action] = {name: partial(passes, layer) for name, layer in layers.items()}
    actions["all-reduces"] = lambda: [dist.all_reduce(message) for message in messages]
    pairs = {("labkit", "plain + 2 all-reduces"): 1.0, ("labkit", "plain"): 3.0}
    yield Contest(
        "SyncBatchNorm 64 x 1024",
        actions,
        pairs,
        derive=lambda times: {"plain + 2 all-reduces": times["plain"] + 2 * times["all-reduces"]},
    )


KINDS = {"all_reduce": all_reduces} | {
    each.__name__: each for each in (data_parallel, sharding, sync_batchnorm)
}


def run(kind: str, options: argparse.Namespace) -> list[tuple[str, bool]]:
    """Time every contest of a kind on these ranks: a line and whether it misses its bound, per
    pair."""
    # Ranks share the cores: with a thread per core each they would wait for one another.
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    lines = []
    for contest in KINDS[kind](options):
        bandwidth = _copy_bandwidth()
        samples = time_interleaved(
            contest.alternatives,
            warmup=3,
            repeats=options.rounds,
            prepare=contest.prepare,
            before=start_together,
            rounds_s=options.seconds * len(contest.alternatives),
        )
        times = {
            name: np.max(gather_numbers(samples_s), axis=0) for name, samples_s in samples.items()
        }
        times |= contest.derive(times)
        lines += [_line(contest, pair, times, bandwidth) for pair in contest.pairs]
    return lines


def start_together() -> None:
    """Return on all ranks at one moment of the clock that they share; they leave a barrier up to
    100 us apart.

    Window synchronization: Hunold & Carpen-Amarie 2016, "Reproducible MPI benchmarking is still not
    as easy as you think".
    """
    moment = torch.tensor(time.perf_counter() + MARGIN_S, dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    start = float(moment)
    # With more ranks than cores, one that spins would keep another from arriving.
    if dist.get_world_size() > (os.cpu_count() or 1):
        time.sleep(max(0.0, start - time.perf_counter()))
    while time.perf_counter() < start:
        pass


def _line(
    contest: Contest, pair: tuple[str, str], times: Times, bandwidth: float
) -> tuple[str, bool]:
    own, theirs = (times[name] for name in pair)
    ratio = compare(own, theirs)
    bound = contest.pairs[pair]
    has_missed = bound is not None and ratio.value > bound
    verdict = ""
    if bound is not None:
        outcome = "MISSED" if has_missed else "met"
        verdict = f"  at most {bound:.2f}: {outcome}"
    ms = f"{median(own) * 1e3:9.3f} ms / {median(theirs) * 1e3:9.3f} ms"
    interval = f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    about = f"{bandwidth / 1e9:5.1f} GB/s  {contest.title:28} {' / '.join(pair):42}"
    return f"{about} {ms}  {interval}{verdict}", has_missed


def _copy_bandwidth() -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.ones(COPY_BYTES // 4)
    copy = {"copy": partial(target.copy_, source)}
    samples_s = time_interleaved(copy, warmup=1, repeats=5, before=start_together)["copy"]
    return COPY_BYTES / median(np.max(gather_numbers(samples_s), axis=0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--worlds", nargs="+", type=int, default=[2], help="numbers of ranks")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of collectives"
    )
    parser.add_argument("--algorithms", nargs="+", choices=["auto", *ALGORITHMS], default=["auto"])
    parser.add_argument("--rounds", type=int, default=200, help="at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="per alternative, at most")
    options = parser.parse_args()
    has_missed = False
    for kind, world_size in product(options.only, options.worlds):
        print(f"{kind}, {world_size} ranks", flush=True)
        lines = run_ranks(run, kind, options, world_size=world_size, timeout_s=3600)[0]
        print("\n".join(line for line, _ in lines), flush=True)
        has_missed |= any(missed for _, missed in lines)
    return int(has_missed)


if __name__ == "__main__":
    sys.exit(main())

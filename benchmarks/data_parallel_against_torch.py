"""labkit's BucketedDDP against torch's DistributedDataParallel: time of a backward pass, ratio by bucket size.

    python benchmarks/data_parallel_against_torch.py [--world-size 2] [--repeats 15] [--model resnet50]
    python benchmarks/data_parallel_against_torch.py --own bucketed_shared --buckets default,25,100

Wrappers of all bucket sizes hold copies of one model and take turns in one group of ranks, one thread each; the
slowest rank of each repeat counts. Below 1, labkit is faster.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.clock import time_interleaved
from labkit.bench.statistics import compare, slowest_rank
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50
from labkit.parallel.data_parallel.implementations import DEFAULT_LAYOUT, OWN_NAMES, wrap
from labkit.parallel.launch import Row, launch

DEFAULT = "default"
BUCKETS = f"{DEFAULT},1,5,10,25,100"  # sizes of every bucket in MiB, the first one's too
ABOUT_100_MB = TransformerShape(d_model=384, d_ff=1536, n_layers=8, n_heads=6, vocabulary=8_000)


def models() -> dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]]:
    """By name: a model and its loss on a random batch of this rank."""
    return {"resnet50": _resnet50, "transformer": _transformer}


def _resnet50() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    return ResNet50(), lambda model: nn.functional.cross_entropy(model(images), labels)


def _transformer() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = torch.randint(8_000, (1, 65))
    model = Transformer(ABOUT_100_MB, context_length=64)
    return model, lambda model: language_model_loss(model(tokens[:, :-1]), tokens[:, 1:])


def measure(point: tuple[str, int, str, str]) -> Iterator[dict[str, Any]]:
    """Seconds of a backward pass, gradients averaged, of every wrapper on this rank."""
    name, repeats, own_name, buckets = point
    implementations = {"torch": "torch", "labkit": own_name}
    torch.manual_seed(dist.get_rank())
    losses: dict[str, Tensor] = {}
    actions, wrappers = {}, {}
    for bucket_mb in buckets.split(","):
        for kind in implementations:
            model, loss_of = models()[name]()
            size = None if bucket_mb == DEFAULT else float(bucket_mb)
            wrapper = wrap(implementations[kind], model, bucket_mb=size)
            key = f"{kind} {bucket_mb}"
            wrappers[key] = (wrapper, loss_of)
            actions[key] = _backward(losses, key)

    def forward(key: str) -> None:
        wrapper, loss_of = wrappers[key]
        wrapper.zero_grad()
        losses[key] = loss_of(wrapper)

    times = time_interleaved(actions, warmup=3, repeats=repeats, prepare=forward, before=dist.barrier)
    for key, seconds in times.items():
        kind, bucket_mb = key.split()
        yield {"implementation": kind, "bucket_mb": bucket_mb, "seconds": seconds}


def _backward(losses: dict[str, Tensor], key: str) -> Callable[[], None]:
    return lambda: losses.pop(key).backward()


def _named(bucket_mb: str) -> str:
    return bucket_mb if bucket_mb == DEFAULT else f"{bucket_mb} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", choices=list(models()), default="resnet50")
    parser.add_argument("--own", choices=OWN_NAMES, default="bucketed")
    parser.add_argument("--buckets", default=BUCKETS, help="sizes in MiB, and default")
    given = parser.parse_args()
    rows = []
    points = [(given.model, given.repeats, given.own, given.buckets)]
    for item in launch(measure, points, world_size=given.world_size, threads=1, timeout_s=900):
        if isinstance(item, Row):
            for repeat, seconds in enumerate(item.values["seconds"]):
                rows.append(item.values | {"repeat": repeat, "seconds": seconds})
        elif item.failure is not None:
            raise SystemExit(item.failure.traceback)
    times = slowest_rank(pd.DataFrame(rows), "seconds", ["implementation", "bucket_mb"])
    by_key = {key: group["seconds"].tolist() for key, group in times.groupby(["implementation", "bucket_mb"])}
    print(f"{DEFAULT}: {DEFAULT_LAYOUT}; a size is that of every bucket")
    for bucket_mb in given.buckets.split(","):
        own, theirs = by_key["labkit", bucket_mb], by_key["torch", bucket_mb]
        print(
            f"{_named(bucket_mb):>8}: torch {pd.Series(theirs).median() * 1e3:6.1f} ms, "
            f"labkit {compare(own, theirs, interleaved=True)}"
        )
    best = {
        kind: min((k for k in by_key if k[0] == kind), key=lambda k: pd.Series(by_key[k]).median())
        for kind in ("torch", "labkit")
    }
    ratio = compare(by_key[best["labkit"]], by_key[best["torch"]], interleaved=True)
    print(f"best against best ({_named(best['labkit'][1])}, torch {_named(best['torch'][1])}): labkit {ratio}")


if __name__ == "__main__":
    main()

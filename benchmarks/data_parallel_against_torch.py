"""labkit's BucketedDDP against torch's DistributedDataParallel: time of a backward pass, ratio by bucket size.

    python benchmarks/data_parallel_against_torch.py [--world-size 2] [--repeats 15] [--model resnet50]

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
from torch.nn.parallel import DistributedDataParallel

from labkit.bench.clock import time_interleaved
from labkit.bench.statistics import compare, slowest_rank
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.nn.vision import ResNet50
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import Row, launch

BUCKETS_MB = (1, 5, 10, 25, 100)
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


def measure(point: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """Seconds of a backward pass, gradients averaged, of every wrapper on this rank."""
    name, repeats = point
    torch.manual_seed(dist.get_rank())
    losses, actions, wrappers = {}, {}, {}
    for bucket_mb in BUCKETS_MB:
        for kind in ("torch", "labkit"):
            model, loss_of = models()[name]()
            wrapper = _wrap(kind, model, bucket_mb)
            wrappers[kind, bucket_mb] = (wrapper, loss_of)
            actions[f"{kind} {bucket_mb}"] = _backward(losses, kind, bucket_mb)
    order = iter(list(wrappers) * (repeats + 3))

    def forward() -> None:
        key = next(order)
        wrapper, loss_of = wrappers[key]
        wrapper.zero_grad()
        losses[key] = loss_of(wrapper)
        dist.barrier()

    for key, seconds in time_interleaved(actions, warmup=3, repeats=repeats, before=forward).items():
        kind, bucket_mb = key.split()
        yield {"implementation": kind, "bucket_mb": int(bucket_mb), "seconds": seconds}


def _wrap(kind: str, model: nn.Module, bucket_mb: int) -> nn.Module:
    if kind == "labkit":
        return BucketedDDP(model, bucket_mb=bucket_mb)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _backward(losses: dict[tuple[str, int], Tensor], kind: str, bucket_mb: int) -> Callable[[], None]:
    return lambda: losses.pop((kind, bucket_mb)).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--model", choices=list(models()), default="resnet50")
    given = parser.parse_args()
    rows = []
    points = [(given.model, given.repeats)]
    for item in launch(measure, points, world_size=given.world_size, threads=1, timeout_s=900):
        if isinstance(item, Row):
            for repeat, seconds in enumerate(item.values["seconds"]):
                rows.append(item.values | {"repeat": repeat, "seconds": seconds})
        elif item.failure is not None:
            raise SystemExit(item.failure.traceback)
    times = slowest_rank(pd.DataFrame(rows), "seconds", ["implementation", "bucket_mb"])
    by_key = {key: group["seconds"].tolist() for key, group in times.groupby(["implementation", "bucket_mb"])}
    for bucket_mb in BUCKETS_MB:
        own, theirs = by_key["labkit", bucket_mb], by_key["torch", bucket_mb]
        print(
            f"{bucket_mb:4d} MB: torch {pd.Series(theirs).median() * 1e3:6.1f} ms, "
            f"labkit {compare(own, theirs, interleaved=True)}"
        )
    best = {
        kind: min((k for k in by_key if k[0] == kind), key=lambda k: pd.Series(by_key[k]).median())
        for kind in ("torch", "labkit")
    }
    ratio = compare(by_key[best["labkit"]], by_key[best["torch"]], interleaved=True)
    print(f"best against best ({best['labkit'][1]} MB, torch {best['torch'][1]} MB): labkit {ratio}")


if __name__ == "__main__":
    main()

"""Time of a training step in shards, labkit's over torch's; float32, AdamW, CPU.

    python benchmarks/sharding_against_torch.py                       # the promises: exits 1 if one is missed
    python benchmarks/sharding_against_torch.py --only fsdp,fully_shard --repeats 30 --world-size 4

Every alternative holds a copy of one Transformer of about 100 MB, and they take turns in one group of ranks, shuffled
every round, under SCHED_BATCH, one thread per rank; the slowest rank counts. Three parts are timed: forward, backward
with its gradients averaged, and the optimizer's step. "(gloo)" is over gloo point to point, the rest of labkit's over
shared memory, and all of torch's over gloo.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from labkit.bench.clock import time_parts_interleaved
from labkit.bench.statistics import compare, slowest_rank
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.launch import Row, launch
from labkit.parallel.sharding import FSDP
from labkit.parallel.sharding.implementations import shard
from labkit.parallel.transport import POINT_TO_POINT, SHARED

ABOUT_100_MB = TransformerShape(d_model=384, d_ff=1536, n_layers=8, n_heads=6, vocabulary=8_000)
TOKENS = 64
PARTS = ("forward", "backward", "optimizer")
SETTINGS: dict[str, Any] = {"lr": 1e-4}
# (numerator, denominator, largest ratio promised) to two ranks on two cores
PROMISES = (
    ("fsdp", "fully_shard", 0.5),
    ("fsdp (gloo)", "fully_shard", 1.0),
    ("zero1", "ddp + ZeroRedundancyOptimizer", 0.9),
    ("zero2", "zero1", 1.0),
)

Made = tuple[nn.Module, Optimizer]


def _made(name: str, transport: str = SHARED) -> Callable[[Transformer], Made]:
    return lambda model: shard(name, model, AdamW, transport=transport, **SETTINGS)


def _not_resharded(model: Transformer) -> Made:
    wrapped = FSDP(model, transport=SHARED, reshard_after_forward=False)
    return wrapped, AdamW(wrapped.parameters(), **SETTINGS)


ALTERNATIVES: Mapping[str, Callable[[Transformer], Made]] = {
    "ddp": _made("torch_ddp"),
    "ddp + ZeroRedundancyOptimizer": _made("torch_zero1"),
    "fully_shard": _made("torch_zero3"),
    "BucketedDDP": _made("ddp"),
    "zero1": _made("zero1"),
    "zero2": _made("zero2"),
    "fsdp": _made("zero3"),
    "fsdp, not resharded": _not_resharded,
    "fsdp (gloo)": _made("zero3", POINT_TO_POINT),
}


def measure(point: tuple[list[str], int]) -> Iterator[dict[str, Any]]:
    """Seconds of the parts of a step of every alternative on this rank."""
    names, repeats = point
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(ABOUT_100_MB.vocabulary, (1, TOKENS + 1))
    made = {name: ALTERNATIVES[name](Transformer(ABOUT_100_MB, context_length=TOKENS)) for name in names}
    losses: dict[str, Tensor] = {}

    def parts(name: str) -> dict[str, Callable[[], Any]]:
        model, optimizer = made[name]

        def forward() -> None:
            losses[name] = language_model_loss(model(tokens[:, :-1]), tokens[:, 1:])

        return dict(zip(PARTS, (forward, lambda: losses.pop(name).backward(), optimizer.step), strict=True))

    def prepare(name: str) -> None:
        made[name][1].zero_grad()

    actions = {name: parts(name) for name in names}
    times = time_parts_interleaved(actions, warmup=3, repeats=repeats, prepare=prepare, before=dist.barrier)
    for name, by_part in times.items():
        for repeat in range(repeats):
            yield {"name": name, "repeat": repeat, **{part: by_part[part][repeat] for part in PARTS}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ALTERNATIVES))
    given = parser.parse_args()
    if unknown := set(given.only) - set(ALTERNATIVES):
        parser.error(f"no {', '.join(unknown)}; there are {', '.join(ALTERNATIVES)}")
    rows = []
    for item in launch(measure, [(given.only, given.repeats)], world_size=given.world_size, threads=1, timeout_s=1800):
        if isinstance(item, Row):
            rows.append(item.values | {"step": sum(item.values[part] for part in PARTS)})
        elif item.failure is not None:
            raise SystemExit(item.failure.traceback)
    slowest = {part: slowest_rank(pd.DataFrame(rows), part, ["name"]) for part in ("step", *PARTS)}
    print(f"{'ms, median':30}" + "".join(f"{part:>11}" for part in slowest))
    for name in given.only:
        medians = [times.loc[times["name"] == name, part].median() * 1e3 for part, times in slowest.items()]
        print(f"{name:30}" + "".join(f"{median:11.1f}" for median in medians))
    steps = {str(name): group["step"].tolist() for name, group in slowest["step"].groupby("name")}
    has_missed = False
    for own, theirs, promise in PROMISES:
        if own in steps and theirs in steps:
            found = compare(steps[own], steps[theirs], interleaved=True)
            is_promised = given.world_size == 2
            has_missed |= is_promised and found.ratio > promise
            verdict = ("MISSED" if found.ratio > promise else "kept") if is_promised else "for two ranks"
            print(f"{own} / {theirs}: {found}, promised {promise}: {verdict}")
    return int(has_missed)


if __name__ == "__main__":
    sys.exit(main())

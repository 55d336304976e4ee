"""Advice as numbers: what fits, the best layouts, the best of other strategies, what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, gcd

import numpy as np

from labkit.scaling.hardware import HARDWARE
from labkit.scaling.prediction import Prediction
from labkit.scaling.published import Neighbor, distinct, nearest
from labkit.scaling.runs import SHARDS, Layout
from labkit.scaling.search import MAX_MICRO_BATCH, Ranking, Request, rank

# A batch may differ by this share from the request: 4M tokens are no whole number of sequences,
# and a number that few ranks divide would leave out most layouts.
ROUNDED = 0.06
# Proposed where memory is short, the smallest first: these can be rented by the node.
LARGER = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "MI300X-192GB")
GPU_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Change:
    """Another request and its best layout; None if nothing fits."""

    name: str
    request: Request
    prediction: Prediction | None

    @property
    def tokens_per_s(self) -> float:
        return self.request.tokens / self.prediction.step_s if self.prediction else 0.0

    @property
    def fits(self) -> bool:
        return self.prediction is not None and self.prediction.fits


@dataclass(frozen=True)
class Advice:
    """Up to three layouts, the best of other strategies, and changes to consider."""

    request: Request
    best: Sequence[Prediction]
    """Empty if nothing fits."""
    first: Prediction
    """The best layout, else the one that needs the least memory."""
    others: Sequence[Prediction]
    """The best layout of each other strategy, or the one with the least memory if none fits."""
    remedy: Change | None
    """The first change that surely fits, else the first that may; None if nothing must change."""
    changes: Sequence[Change]
    """What would make room if memory is short, then variations of the request if it fits."""
    neighbors: Sequence[Neighbor]
    """The published runs nearest to the first layout."""


def round_batch(tokens: float, seq_len: int, gpus: int) -> int:
    """Return sequences per step: of exactly `tokens`, else a near number that many ranks divide.

    ValueError for fewer tokens than one sequence.
    """
    if tokens < seq_len:
        raise ValueError(
            f"expected a sequence or more per step: {tokens:.0f} tokens are less than {seq_len}"
        )
    sequences = tokens / seq_len
    if sequences == int(sequences):
        return int(sequences)
    near = range(ceil(sequences * (1 - ROUNDED)), floor(sequences * (1 + ROUNDED)) + 1)

    def preference(count: int) -> tuple[float, ...]:
        return gcd(count, gpus), gcd(count, MAX_MICRO_BATCH * gpus), -abs(count - sequences)

    return max((*near, round(sequences)), key=preference)


def advise(request: Request) -> Advice:
    """Find the best layouts and changes to consider. ValueError if no layout is possible."""
    ranking = rank(request)
    best = ranking.proposed()
    first = ranking.first()
    changes = []
    if not first.fits:
        changes = list(_remedies(request, ranking))
    remedy = min(changes, key=lambda change: not change.fits, default=None)
    others = []
    if best:
        others = _other_strategies(ranking, best)
        changes += [_answer(name, changed) for name, changed in _variations(request)]
    near = nearest(request.run(first.layout))
    return Advice(request, best, first, others, remedy, changes, near)


def strategy(layout: Layout) -> str:
    """Name of a layout's strategy."""
    if layout.cp > 1:
        return "context parallel"
    degrees = {"tensor": layout.tp, "pipeline": layout.pp}
    kinds = [kind for kind, ranks in degrees.items() if ranks > 1]
    return " and ".join(kinds) or SHARDS[layout.shard]


def _other_strategies(ranking: Ranking, best: Sequence[Prediction]) -> list[Prediction]:
    predictions = ranking.predictions
    layouts = [run.layout for run in predictions.runs.origin]
    # Layouts that fit by their time; behind them all by memory, for strategies that never fit.
    order = (*ranking.order, *np.argsort(predictions.peak_gib).tolist())
    proposed = {prediction.layout for prediction in best}
    first = distinct(order, lambda row: strategy(layouts[row]))
    return predictions.select([row for row in first if layouts[row] not in proposed])


def _answer(name: str, request: Request, *, must_fit: bool = False) -> Change:
    """Find another request's best layout; with `must_fit` one that surely fits, if there is one."""
    # A change may make the request impossible, as with GPUs that a fixed layout does not divide.
    try:
        ranking = rank(request)
    except ValueError:
        return Change(name, request, None)
    rows = ranking.fitting if must_fit and ranking.fitting else ranking.order
    best = ranking.predictions.select(rows[:1])
    return Change(name, request, best[0] if best else None)


def _remedies(request: Request, ranking: Ranking) -> Iterator[Change]:
    """Yield of each kind of change the first that surely fits, else its last."""
    # A layout with less memory may be slower, which is why it was not the best.
    for lean in ranking.predictions.select(ranking.fitting[:1]):
        yield Change("a layout that needs less memory", request, lean)
    for kind in _larger(request):
        change = None
        for name, changed in kind:
            change = _answer(name, changed, must_fit=True)
            if change.fits:
                break
        if change is not None and change.prediction is not None:
            yield change


def _larger(request: Request) -> Iterator[list[tuple[str, Request]]]:
    """Yield kinds of changes that may make it fit, each in steps; GPUs have to be rented."""
    hardware = request.hardware
    for name, value in request.fixed.items():
        yield [(f"not {name.replace('_', '-')} {value}", request.without(name))]
    more = [factor * request.gpus for factor in GPU_FACTORS]
    yield [(f"{gpus} GPUs", replace(request.without("dp"), gpus=gpus)) for gpus in more]
    # The nodes and their network stay: only their GPUs change.
    cards = [
        HARDWARE[name].with_network(
            network_gbps=hardware.network_gbps, gpus_per_node=hardware.gpus_per_node
        )
        for name in LARGER
        if HARDWARE[name].memory_gib > hardware.memory_gib
    ]
    yield [(f"{request.gpus} x {card.name}", replace(request, hardware=card)) for card in cards]
    if request.seq_len % 2 == 0:
        # Twice as many sequences: the tokens per step, which the training depends on, stay.
        half = request.seq_len // 2
        shorter = replace(request, seq_len=half, global_batch=2 * request.global_batch)
        yield [(f"sequences of {half}", shorter)]


def _variations(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with another network, number of GPUs, sequence, batch or precision."""
    hardware = request.hardware
    gpus = request.gpus
    batch = request.global_batch
    # GPUs of one node use no network.
    if gpus > hardware.gpus_per_node:
        for name, factor in (("network twice as fast", 2.0), ("network ten times slower", 0.1)):
            changed = hardware.with_network(network_gbps=factor * hardware.network_gbps)
            yield name, replace(request, hardware=changed)
    if gpus % 2 == 0:
        yield "half the GPUs", replace(request, gpus=gpus // 2)
    yield "twice the GPUs", replace(request, gpus=2 * gpus)
    if batch % 2 == 0:
        longer = replace(request, seq_len=2 * request.seq_len, global_batch=batch // 2)
        yield "sequences twice as long", longer
        yield "half the tokens per step", replace(request, global_batch=batch // 2)
    if request.precision != "fp8" and hardware.fp8_ratio > 1:
        yield "fp8 matmuls", replace(request, precision="fp8")

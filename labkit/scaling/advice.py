"""Advice as numbers: what fits, the best layouts, why others lose, what would help."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, gcd

import numpy as np

from labkit.scaling.communication import BF16, Group, rank_parameters
from labkit.scaling.constants import Constants
from labkit.scaling.hardware import HARDWARE
from labkit.scaling.prediction import Prediction
from labkit.scaling.runs import SHARDS, Layout, Run, Runs
from labkit.scaling.search import MAX_MICRO_BATCH, Ranking, Request, rank

ROUNDED = 0.06
"""A batch may differ by this share from the request, so that it divides over more ranks."""
LARGER = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "MI300X-192GB")
"""GPUs that can be rented by the node, by memory."""
GPU_FACTORS = (2, 4, 8, 16, 32, 64, 128, 256)
SUMS = {
    "compute": ("gemm_s", "attention_s", "elementwise_s", "head_s"),
    "CPU launches": ("launch_s",),
    "tensor-parallel collectives": ("tensor_parallel_s",),
    "keys and values around the ring": ("context_parallel_s",),
    "gathering parameters": ("gather_s",),
    "pipeline bubble and transfers": ("bubble_s", "pipeline_transfer_s", "engine_s"),
    "gradient reduction": ("data_parallel_s",),
    "optimizer": ("optimizer_s",),
}
"""Groups of parts that add up to the step."""


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of another strategy.

    `cause` is the sum of `SUMS` that loses most, "memory" or "unstable".
    """

    strategy: str
    prediction: Prediction
    cause: str


@dataclass(frozen=True)
class Change:
    """Another request and its best layout; None if nothing fits."""

    name: str
    request: Request
    prediction: Prediction | None

    @property
    def tokens_per_s(self) -> float:
        return self.request.tokens / self.prediction.step_s if self.prediction else 0.0


@dataclass(frozen=True)
class Advice:
    """Up to three layouts, the best of other strategies, and changes to consider."""

    request: Request
    best: Sequence[Prediction]
    """Empty if nothing fits."""
    first: Prediction
    """The best layout, else the one that needs the least memory."""
    runners_up: Sequence[RunnerUp]
    remedies: Sequence[Change]
    """Changes that make it fit, or fit with room to spare; empty if there is room."""
    changes: Sequence[Change]
    """Variations of the request."""


def round_batch(tokens: float, seq_len: int, gpus: int) -> int:
    """Return sequences per step: exactly `tokens` if that is whole, else a near number.

    One that many ranks and batches divide.

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
    return max(
        (*near, round(sequences)),
        key=lambda count: (
            gcd(count, gpus),
            gcd(count, MAX_MICRO_BATCH * gpus),
            -abs(count - sequences),
        ),
    )


def advise(request: Request) -> Advice:
    """Find the best layouts and changes to consider.

    ValueError, with the reason, if no layout is possible.
    """
    ranking = rank(request)
    best = ranking.proposed()
    first = ranking.first()
    if not best:
        return Advice(request, best, first, [], _helpful(request), [])
    return Advice(
        request=request,
        best=best,
        first=first,
        runners_up=list(_runners_up(ranking, best)),
        remedies=[] if first.has_room else _helpful(request),
        changes=[_answer(*variation) for variation in _variations(request)],
    )


def bucket_bytes(run: Run, constants: Constants) -> float | None:
    """Return the bytes per bucket that expose least time: a call each, and the last transfer.

    None without data parallelism; a layer if parameters are sharded.
    """
    layout = run.layout
    runs = Runs([run], constants)
    if layout.dp * layout.cp == 1:
        return None
    if layout.shard in ("zero3", "hsdp"):
        return float(BF16 * runs.layer_parameters[0] / layout.tp)
    n_bytes = rank_parameters(runs) * runs["gradient_bytes"]
    ranks = Group(runs, runs.dp * runs.cp, runs.tp)
    call_s, whole_s = (ranks.all_reduce_s(moved) for moved in (0 * n_bytes, n_bytes))
    return float((n_bytes * np.minimum(np.sqrt(call_s / (whole_s - call_s)), 1))[0])


def sums_s(prediction: Prediction) -> dict[str, float]:
    return {name: sum(prediction.parts_s[part] for part in parts) for name, parts in SUMS.items()}


def strategy(layout: Layout) -> str:
    """Name of a layout's strategy."""
    if layout.cp > 1:
        return "context parallel"
    names = {
        (True, False): "tensor parallel",
        (False, True): "pipeline",
        (True, True): "tensor and pipeline",
    }
    return names.get((layout.tp > 1, layout.pp > 1), SHARDS[layout.shard])


def _runners_up(ranking: Ranking, best: Sequence[Prediction]) -> Iterator[RunnerUp]:
    """The best layout of each strategy, or the one with the least memory if none fits."""
    fits = set(ranking.order)
    first = dict[str, int]()
    for row in (*ranking.order, *np.argsort(ranking.predictions.peak_gib)):
        first.setdefault(strategy(ranking.predictions.runs.origin[row].layout), int(row))
    proposed = {one.layout for one in best}
    best_s = sums_s(best[0])
    for name, row in sorted(first.items()):
        prediction = ranking.predictions.prediction(row)
        if prediction.layout not in proposed:
            lost = {part: seconds - best_s[part] for part, seconds in sums_s(prediction).items()}
            cause = max(lost, key=lost.__getitem__)
            if row not in fits:
                cause = "memory"
            elif prediction.is_unstable and not best[0].is_unstable:
                cause = "unstable"
            yield RunnerUp(name, prediction, cause)


def _answer(name: str, request: Request, *, with_room: bool = False) -> Change:
    """Find the best layout of another request, with room to spare if one has it.

    None if nothing fits.
    """
    try:
        ranking = rank(request)
    except ValueError:
        return Change(name, request, None)
    rows = ranking.order
    if with_room:
        rows = [row for row in rows if ranking.predictions.has_room[row]] or rows
    return Change(name, request, ranking.predictions.prediction(rows[0]) if rows else None)


def _helpful(request: Request) -> list[Change]:
    """Of each kind of remedy the first that leaves room to spare; if none does, those that fit."""
    changes = []
    for kind in _remedies(request):
        for name, changed in kind:
            change = _answer(name, changed, with_room=True)
            if change.prediction and change.prediction.has_room:
                break
        changes.append(change)
    fitting = [change for change in changes if change.prediction]
    return [
        change for change in fitting if change.prediction and change.prediction.has_room
    ] or fitting


def _remedies(request: Request) -> Iterator[list[tuple[str, Request]]]:
    """Yield kinds of changes to try.

    Another layout, fixed values, more or larger GPUs, 16-bit states, shorter sequences.
    """
    fixed = request.fixed
    present = request.hardware

    def without(name: str) -> Request:
        return replace(
            request, fixed={other: value for other, value in fixed.items() if other != name}
        )

    yield [("a layout that needs less memory", request)]
    yield from (
        [(f"not {name.replace('_', '-')} {value}", without(name))] for name, value in fixed.items()
    )
    more = [factor * request.gpus for factor in GPU_FACTORS]
    yield [(f"{gpus} GPUs", replace(without("dp"), gpus=gpus)) for gpus in more]
    cards = [
        HARDWARE[name].with_network(
            network_gbps=present.network_gbps, gpus_per_node=present.gpus_per_node
        )
        for name in LARGER
        if HARDWARE[name].memory_gib > present.memory_gib
    ]
    if cards:
        yield [(f"{request.gpus} x {card.name}", replace(request, hardware=card)) for card in cards]
    low_precision = {**fixed, "options": frozenset({"low_precision_master"})}
    yield [("optimizer states in 16 bits", replace(request, fixed=low_precision))]
    if request.seq_len % 2 == 0:
        shorter = replace(
            request, seq_len=request.seq_len // 2, global_batch=2 * request.global_batch
        )
        yield [(f"sequences of {shorter.seq_len}", shorter)]


def _variations(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with another network, number of GPUs, sequence, batch or precision."""
    hardware = request.hardware
    gpus = request.gpus
    batch = request.global_batch
    if gpus > hardware.gpus_per_node:
        for name, factor in (("network twice as fast", 2.0), ("network ten times slower", 0.1)):
            changed = hardware.with_network(network_gbps=factor * hardware.network_gbps)
            yield name, replace(request, hardware=changed)
    if gpus % 2 == 0:
        yield "half the GPUs", replace(request, gpus=gpus // 2)
    yield "twice the GPUs", replace(request, gpus=2 * gpus)
    if batch % 2 == 0:
        yield (
            "sequences twice as long",
            replace(request, seq_len=2 * request.seq_len, global_batch=batch // 2),
        )
        yield "half the tokens per step", replace(request, global_batch=batch // 2)
    if request.precision != "fp8" and hardware.fp8_ratio > 1:
        yield "fp8 matmuls", replace(request, precision="fp8")

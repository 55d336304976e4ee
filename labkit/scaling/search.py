"""Ranks layouts: every possible one is predicted, and the fastest that fit come first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, get_args

import numpy as np

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import Hardware
from labkit.scaling.intervals import MAX_DISTANCE
from labkit.scaling.models import Model, Numbers
from labkit.scaling.prediction import Prediction, Predictions, predict_runs
from labkit.scaling.published import distinct
from labkit.scaling.runs import (
    Layout,
    Precision,
    Recompute,
    Run,
    Runs,
    Shard,
    impossible_reason,
    nearest_divisor,
)

MAX_MICRO_BATCH = 64
# Tokens per micro-batch and rank with several sequences: matmuls are large enough by then.
MAX_TOKENS = 2**17
# Tokens per sequence and context-parallel rank; published trainings use no fewer.
MIN_TOKENS = 4096
# Chunks per stage of interleaved schedules to try.
CHUNKS = (2, 4)
PROPOSED = 3
# How strongly a risk of running out of memory counts against a layout.
RISK_EXPONENT = 0.25
# Share by which a layout must be faster, per unit of distance from measured runs.
CAUTION = 0.03


@dataclass(frozen=True)
class Request:
    """A training on some GPUs: `global_batch` sequences of `seq_len` tokens per step."""

    model: Model
    hardware: Hardware
    gpus: int
    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    framework: str = "generic"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout` with the only value to try."""
    constants: Constants = field(default_factory=load_constants)
    budget: float = 0.0
    """Tokens to train on."""
    notes: Sequence[str] = ()
    """Sentences on what it assumes."""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len

    def without(self, name: str) -> "Request":
        """Return the request with a field of the layout no longer fixed."""
        fixed = {other: value for other, value in self.fixed.items() if other != name}
        return replace(self, fixed=fixed)

    def run(self, layout: Layout) -> Run:
        return Run(self.model, self.hardware, layout, self.seq_len, self.framework)


@dataclass(frozen=True, eq=False)
class Ranking:
    """Every layout that was tried, as columns."""

    predictions: Predictions
    order: list[int]
    """Rows of the layouts expected to fit, the best first."""

    @property
    def fitting(self) -> list[int]:
        """Rows of the layouts whose upper end of memory fits, too, the best first."""
        fits = self.predictions.fits
        return [row for row in self.order if fits[row]]

    def proposed(self, count: int = PROPOSED) -> list[Prediction]:
        """Return the best layout of each of the first `count` arrangements of the ranks."""
        # Layouts of one arrangement differ in batch and recomputation, and would fill the list.
        rows = distinct(
            self.order, lambda row: self.predictions.runs.origin[row].layout.arrangement, count
        )
        return self.predictions.select(rows)

    def first(self) -> Prediction:
        """Return the best layout; if none fits, the one that needs the least memory."""
        row = int(np.argmin(self.predictions.peak_gib))
        if self.order:
            row = self.order[0]
        return self.predictions.select([row])[0]


def rank(request: Request) -> Ranking:
    """Rank all layouts. ValueError if none is possible and near measured runs."""
    runs = []
    first_reason = None
    for layout in _layouts(request):
        reason = impossible_reason(layout, request.model, request.seq_len)
        if reason is None:
            runs.append(request.run(layout))
        first_reason = first_reason or reason
    if not runs:
        raise ValueError(first_reason or _no_layout_reason(request))
    predictions = predict_runs(Runs(runs, request.constants))
    reason = predictions.refusal_reason(int(predictions.distance.argmin()))
    if reason is not None:
        raise ValueError(reason)
    # Of equally fast layouts, one of a kind that people have published is preferred.
    preference = preference_s(predictions) * (1 + CAUTION * predictions.distance)
    order = np.argsort(preference, kind="stable")
    is_candidate = predictions.may_fit & (predictions.distance <= MAX_DISTANCE)
    return Ranking(predictions, order[is_candidate[order]].tolist())


def preference_s(predictions: Predictions) -> Numbers:
    """Return seconds to rank by: more with the risk of running out of memory."""
    # All layouts share what is not known of a framework's memory, so risk counts little.
    return predictions.step_s * (1 - np.minimum(predictions.out_of_memory, 0.99)) ** -RISK_EXPONENT


def _layouts(request: Request) -> Iterator[Layout]:
    """Yield every arrangement of the ranks, with all batches, shardings and schedules it allows.

    Tensor parallelism stays inside a node, with equally many key heads on each rank.
    """
    model = request.model
    fixed = request.fixed
    batch = request.global_batch

    def choices(name: str, values: Iterable[Any]) -> Iterable[Any]:
        return (fixed[name],) if name in fixed else values

    inside = _powers(min(request.gpus, request.hardware.gpus_per_node))
    contexts = choices("cp", _powers(request.seq_len // MIN_TOKENS))
    for tp in choices("tp", [degree for degree in inside if model.kv_heads % degree == 0]):
        # At least a layer per stage: equally many, or a power of two of stages.
        stages = [pp for pp in range(1, model.layers + 1) if request.gpus // tp % pp == 0]
        even = [pp for pp in stages if model.layers % pp == 0 or pp & (pp - 1) == 0]
        for pp, cp in product(choices("pp", even), contexts):
            dp, rest = divmod(request.gpus, tp * pp * cp)
            if rest or fixed.get("dp", dp) != dp:
                continue
            most_tokens = max(MAX_TOKENS * cp // request.seq_len, 1)
            largest = min(max(batch // dp, 1), MAX_MICRO_BATCH, most_tokens)
            for micro_batch, shard in product(
                choices("micro_batch", _powers(largest)), _shards(request, tp, pp, cp, dp)
            ):
                chunks = _chunks(model.layers, pp, shard, batch // (dp * micro_batch))
                for vp, recompute in product(
                    choices("vp", chunks), choices("recompute", get_args(Recompute))
                ):
                    yield Layout(
                        tp=tp,
                        sequence_parallel=tp > 1,
                        pp=pp,
                        vp=vp,
                        cp=cp,
                        dp=dp,
                        shard=shard,
                        micro_batch=micro_batch,
                        global_batch=batch,
                        recompute=recompute,
                        precision=request.precision,
                    )


def _shards(request: Request, tp: int, pp: int, cp: int, dp: int) -> list[Shard]:
    """Return the shardings to try. Nothing is sharded over one rank, fixed or not."""
    shards: list[Shard] = ["none"]
    if dp * cp > 1:
        shards.append("zero1")
        # With a pipeline zero2 would reduce gradients for every micro-batch.
        if pp == 1:
            shards.append("zero2")
        shards.append("zero3")
        if pp == 1 and 1 < request.hardware.gpus_per_node // (tp * cp) < dp:
            shards.append("hsdp")
    return [shard for shard in shards if request.fixed.get("shard", shard) == shard]


def _chunks(layers: int, pp: int, shard: Shard, micro_batches: int) -> list[int]:
    """Return numbers of equal chunks of layers per stage; 1 is no interleaving."""
    # Interleaved, micro-batches come in groups of pp (arXiv:2104.04473).
    if pp > 1 and shard in ("none", "zero1") and micro_batches % pp == 0:
        return [1, *(vp for vp in CHUNKS if layers % (pp * vp) == 0)]
    return [1]


def _no_layout_reason(request: Request) -> str:
    """Return why no layout has the fixed values."""
    fixed = request.fixed
    gpus = request.gpus
    degrees = {name: value for name, value in fixed.items() if name in ("tp", "pp", "cp", "dp")}
    total = prod(degrees.values())
    if gpus % total:
        near = nearest_divisor(gpus, total)
        name = " x ".join(degrees)
        return f"{gpus} GPUs cannot be divided over {name} = {total}; the nearest divisor is {near}"
    # As zero3 with dp = 1: nothing is sharded over one rank.
    values = ", ".join(f"{name} {value}" for name, value in {"gpus": gpus, **fixed}.items())
    return f"no layout has {values} together: change one of them"


def _powers(largest: int) -> list[int]:
    """Return 1, 2, 4 up to `largest`; 1 in any case."""
    return [1 << exponent for exponent in range(max(largest, 1).bit_length())]

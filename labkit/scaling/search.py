"""Ranks layouts: every possible one is predicted, and the fastest that fit come first."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.ground import MAX_DISTANCE
from labkit.scaling.hardware import Hardware
from labkit.scaling.layout import RECOMPUTE, Layout, impossible_reason
from labkit.scaling.model import Model, Numbers
from labkit.scaling.prediction import Predictions, predict_runs, refusal_reason
from labkit.scaling.runs import Run, Runs

MAX_MICRO_BATCH = 64
MAX_TOKENS = 2**17
"""Per micro-batch and rank, if it has several sequences: matmuls are large enough by then."""
MIN_TOKENS = 4096
"""Per sequence and context-parallel rank: published trainings go no shorter."""
INTERLEAVED = (1, 2, 4)
PROPOSED = 3
CAUTION = 0.03
"""A layout must be faster by this share per unit of distance from measured ground to be preferred."""


@dataclass(frozen=True)
class Candidate:
    """A layout and its prediction; `parts_s` add up to `step_s`."""

    layout: Layout
    step_s: float
    interval_90: tuple[float, float]
    mfu: float
    peak_gib: float
    out_of_memory: float
    is_unstable: bool
    parts_s: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Every layout that was tried, as columns."""

    layouts: list[Layout]
    runs: Runs
    found: Predictions
    order: list[int]
    """Rows of the layouts expected to fit, the best first."""

    def candidate(self, row: int) -> Candidate:
        found = self.found
        return Candidate(
            layout=self.layouts[row],
            step_s=float(found.step_s[row]),
            interval_90=(float(found.low_90[row]), float(found.high_90[row])),
            mfu=float(found.mfu[row]),
            peak_gib=float(found.peak_gib[row]),
            out_of_memory=float(found.out_of_memory[row]),
            is_unstable=bool(found.is_unstable[row]),
            parts_s={name: float(seconds[row]) for name, seconds in found.parts_s.items()},
        )

    def proposed(self, count: int = PROPOSED) -> list[Candidate]:
        """The best layout of each of the first `count` arrangements of the ranks."""
        return [self.candidate(row) for row in distinct(self.order, lambda row: arrangement(self.layouts[row]), count)]

    def min_memory(self) -> Candidate:
        """The layout that needs the least memory, whether it fits or not."""
        return self.candidate(int(np.argmin(self.found.peak_gib)))


def arrangement(layout: Layout) -> tuple[object, ...]:
    """Degrees and sharding, by which two proposals differ; batch, chunks and recomputation are settings of them."""
    return layout.tp, layout.pp, layout.cp, layout.shard


def distinct(rows: Iterable[int], key: Callable[[int], object], count: int) -> list[int]:
    """The first `count` rows of different keys, in their order."""
    first: dict[object, int] = {}
    for row in rows:
        if len(first) == count:
            break
        first.setdefault(key(row), row)
    return list(first.values())


def rank(
    model: Model,
    hardware: Hardware,
    gpus: int,
    *,
    seq_len: int,
    global_batch: int,
    framework: str = "generic",
    precision: str = "bf16",
    fixed: Mapping[str, Any] | None = None,
    constants: Constants | None = None,
) -> Ranking:
    """All layouts for this many GPUs; `fixed` are fields of `Layout` with the only value to try.

    Layouts whose memory makes steps unstable come after all others. ValueError if no layout is possible.
    """
    if gpus < 1 or global_batch < 1 or seq_len < 1:
        raise ValueError(f"expected 1 or more GPUs, sequences and tokens, got {gpus}, {global_batch} and {seq_len}")
    constants, fixed = constants or load_constants(), dict(fixed or {}) | {"precision": precision}
    layouts = [
        layout
        for layout in _layouts(model, hardware, gpus, seq_len, global_batch, fixed)
        if impossible_reason(layout, model, seq_len) is None
    ]
    if not layouts:
        raise ValueError(_no_layout_reason(model, gpus, seq_len, global_batch, fixed))
    runs = Runs.from_runs([Run(model, hardware, layout, seq_len, framework) for layout in layouts])
    found = predict_runs(runs, constants)
    if found.distance.min() > MAX_DISTANCE:
        raise ValueError(refusal_reason(runs, int(found.distance.argmin()), found, constants) or "")
    preference = preference_s(found) * (1 + CAUTION * (found.distance - found.distance.min()))
    order = [int(row) for row in np.argsort(preference, kind="stable") if found.fits[row]]
    return Ranking(layouts, runs, found, order)


def preference_s(found: Predictions) -> Numbers:
    """Seconds to rank by: more with the chance of running out of memory, far more if unstable or too large."""
    risk = 1 / (1 - np.minimum(found.out_of_memory, 0.99))
    slow = np.where(found.is_unstable, 3.0, 1.0)  # published ones are 1.5 to 8 times slow
    return found.step_s * risk * slow * np.where(found.fits, 1.0, 1e3)


def _layouts(
    model: Model, hardware: Hardware, gpus: int, seq_len: int, global_batch: int, fixed: Mapping[str, Any]
) -> Iterator[Layout]:
    """Every arrangement of the ranks with every batch, sharding, schedule and recomputation that it allows."""
    same: dict[str, Any] = {name: fixed[name] for name in ("precision", "options") if name in fixed}
    for tp, pp, cp in _degrees(model, hardware, gpus, seq_len, fixed):
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or fixed.get("dp", dp) != dp:
            continue
        same |= {"tp": tp, "sequence_parallel": tp > 1, "pp": pp, "cp": cp, "dp": dp, "global_batch": global_batch}
        largest = min(max(global_batch // dp, 1), MAX_MICRO_BATCH, max(MAX_TOKENS * cp // seq_len, 1))
        batches, shards = _among(fixed, "micro_batch", _powers(largest)), list(_shards(hardware, tp, pp, cp, dp))
        if "shard" in fixed:
            shards = [shard for shard in shards if shard == fixed["shard"]]  # nothing is sharded over one rank
        for micro_batch, shard in product(batches, shards):
            chunks = _among(fixed, "vp", _chunks(model.layers, pp, shard, global_batch // (dp * micro_batch)))
            for vp, recompute in product(chunks, _among(fixed, "recompute", RECOMPUTE)):
                yield Layout(**same, micro_batch=micro_batch, shard=shard, vp=vp, recompute=recompute)


def _degrees(
    model: Model, hardware: Hardware, gpus: int, seq_len: int, fixed: Mapping[str, Any]
) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, cp): tensor parallelism inside a node, with equally many key heads on each rank."""
    inside = [degree for degree in _powers(min(gpus, hardware.gpus_per_node)) if model.kv_heads % degree == 0]
    for tp in _among(fixed, "tp", inside):
        stages = _among(fixed, "pp", _divisors(gpus // tp, model.layers))
        yield from ((tp, pp, cp) for pp, cp in product(stages, _among(fixed, "cp", _powers(seq_len // MIN_TOKENS))))


def _among(fixed: Mapping[str, Any], name: str, values: Iterable[Any]) -> Iterable[Any]:
    return (fixed[name],) if name in fixed else values


def _shards(hardware: Hardware, tp: int, pp: int, cp: int, dp: int) -> Iterator[str]:
    """Shardings to try. zero2 with a pipeline would reduce gradients for every micro-batch."""
    yield "none"
    if dp * cp > 1:
        yield "zero1"
        if pp == 1:
            yield "zero2"
        yield "zero3"
        inside = hardware.gpus_per_node // (tp * cp)
        if pp == 1 and 1 < inside < dp:
            yield "hsdp"


def _chunks(layers: int, pp: int, shard: str, micro_batches: int) -> Iterator[int]:
    """Interleaved schedules take equal chunks of layers, and micro-batches in groups of pp (arXiv:2104.04473)."""
    yield 1
    if pp > 1 and shard in ("none", "zero1") and micro_batches % pp == 0:
        yield from (vp for vp in INTERLEAVED[1:] if layers % (pp * vp) == 0)


def _no_layout_reason(model: Model, gpus: int, seq_len: int, global_batch: int, fixed: Mapping[str, Any]) -> str:
    """Why the fixed values are impossible; else that nothing divides."""
    degrees = {name: value for name, value in fixed.items() if name in ("tp", "pp", "cp", "dp")}
    total = int(np.prod(list(degrees.values()) or [1]))
    if gpus % total:
        return f"{' x '.join(degrees)} is {total}, and {gpus} GPUs cannot be divided by it"
    dp = fixed.get("dp", gpus // total if {"tp", "pp", "cp"} <= set(degrees) else 1)
    given = {"global_batch": global_batch, **fixed, "dp": dp}
    if reason := impossible_reason(Layout(**given), model, seq_len):
        return reason
    easier = "try a batch that the number of GPUs divides"
    return f"no layout divides {model.layers} layers and {global_batch} sequences over {gpus} GPUs: {easier}"


def _powers(largest: int) -> list[int]:
    """1, 2, 4 up to `largest`; 1 in any case."""
    return [1 << exponent for exponent in range(max(largest, 1).bit_length())]


def _divisors(gpus: int, layers: int) -> Iterator[int]:
    """Pipeline degrees that divide the GPUs, and the layers evenly or by powers of two."""
    return (
        degree
        for degree in range(1, min(gpus, layers) + 1)
        if gpus % degree == 0 and (layers % degree == 0 or degree & (degree - 1) == 0)
    )

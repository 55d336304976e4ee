"""Advice as numbers: whether a training fits, the best layouts, why others lose, and what would change the answer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, floor, gcd

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import HARDWARE, Hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import Model
from labkit.scaling.prediction import Prediction, predict
from labkit.scaling.runs import Run
from labkit.scaling.search import MAX_MICRO_BATCH, Candidate, Ranking, rank

ROUNDED = 0.06
"""A batch may differ by this share from the request, so that it divides over more ranks."""
SAFE = 0.05
"""Chance of running out of memory below which no change is needed."""
LARGER = ("A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "MI300X-192GB")
"""GPUs that can be rented by the node, by memory."""
GPU_FACTORS = (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
SUMS = {
    "compute": ("gemm_s", "attention_s", "elementwise_s", "head_s"),
    "launch": ("launch_s",),
    "tensor_parallel": ("tensor_parallel_s",),
    "context_parallel": ("context_parallel_s",),
    "gather": ("gather_s",),
    "pipeline": ("bubble_s", "pipeline_transfer_s", "engine_s"),
    "data_parallel": ("data_parallel_s",),
    "optimizer": ("optimizer_s",),
    "stragglers": ("straggler_s",),
}
"""Groups of parts that add up to the step."""
STRATEGIES: Mapping[str, Callable[[Layout], bool]] = {
    "data parallel, whole copies": lambda one: _is_flat(one) and one.shard == "none",
    "ZeRO-1": lambda one: _is_flat(one) and one.shard == "zero1",
    "ZeRO-2": lambda one: _is_flat(one) and one.shard == "zero2",
    "FSDP (ZeRO-3)": lambda one: _is_flat(one) and one.shard == "zero3",
    "FSDP inside nodes (HSDP)": lambda one: _is_flat(one) and one.shard == "hsdp",
    "tensor parallel": lambda one: one.tp > 1 and one.pp == one.cp == 1,
    "pipeline": lambda one: one.pp > 1 and one.tp == one.cp == 1,
    "tensor and pipeline": lambda one: one.pp > 1 and one.tp > 1 and one.cp == 1,
    "context parallel": lambda one: one.cp > 1,
}


def _is_flat(layout: Layout) -> bool:
    return layout.tp == layout.pp == layout.cp == 1


@dataclass(frozen=True)
class Request:
    """A training on some GPUs: `global_batch` sequences of `seq_len` tokens per step.

    `fixed` as `rank` takes it; `reserve_gib` of each GPU's memory stay free.
    """

    model: Model
    hardware: Hardware
    gpus: int
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    framework: str = "generic"
    fixed: Mapping[str, object] = field(default_factory=dict)
    reserve_gib: float = 0.0
    constants: Constants = field(default_factory=load_constants)

    @property
    def usable(self) -> Hardware:
        """The hardware without the reserved memory. ValueError if none is left."""
        return replace(self.hardware, memory_gib=self.hardware.memory_gib - self.reserve_gib)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.seq_len

    def ranking(self) -> Ranking:
        """ValueError where no layout is possible."""
        return rank(
            self.model,
            self.usable,
            self.gpus,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            framework=self.framework,
            precision=self.precision,
            fixed=self.fixed,
            constants=self.constants,
        )

    def run(self, layout: Layout) -> Run:
        return Run(self.model, self.usable, layout, self.seq_len, self.framework)

    def prediction(self, layout: Layout) -> Prediction:
        return predict(
            self.model,
            self.usable,
            layout,
            seq_len=self.seq_len,
            framework=self.framework,
            constants=self.constants,
        )


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of another strategy; `cause` is the sum of `SUMS` that loses most, "memory" or "unstable"."""

    strategy: str
    candidate: Candidate
    cause: str
    lost_s: float


@dataclass(frozen=True)
class Change:
    """Another request and its best layout; None if nothing fits."""

    name: str
    request: Request
    candidate: Candidate | None

    @property
    def tokens_per_s(self) -> float:
        return self.request.tokens / self.candidate.step_s if self.candidate else 0.0


@dataclass(frozen=True)
class Advice:
    """Up to three layouts and what surrounds them."""

    request: Request
    best: Sequence[Candidate]
    """Empty if nothing fits."""
    first: Candidate
    """The best layout, else the one that needs the least memory."""
    prediction: Prediction
    """For `first`."""
    runners_up: Sequence[RunnerUp]
    remedies: Sequence[Change]
    """Changes that make it fit, or fit with room to spare; empty if there is room."""
    changes: Sequence[Change]
    """Variations of the request."""

    @property
    def fits(self) -> bool:
        return bool(self.best)


def round_batch(tokens: float, seq_len: int, gpus: int) -> int:
    """Sequences per step: exactly `tokens` if that is whole, else a near number that many ranks and batches divide.

    ValueError for fewer tokens than one sequence.
    """
    if tokens < seq_len:
        raise ValueError(f"expected a sequence or more per step: {tokens:.0f} tokens are less than {seq_len}")
    sequences = tokens / seq_len
    if sequences == int(sequences):
        return int(sequences)
    near = range(ceil(sequences * (1 - ROUNDED)), floor(sequences * (1 + ROUNDED)) + 1)
    return max(
        (*near, round(sequences)),
        key=lambda count: (gcd(count, gpus), gcd(count, MAX_MICRO_BATCH * gpus), -abs(count - sequences)),
    )


def advise(request: Request) -> Advice:
    """The best layouts and what surrounds them. ValueError if no layout is possible, with the reason."""
    ranking = request.ranking()
    best = ranking.proposed()
    first = best[0] if best else ranking.min_memory()
    return Advice(
        request=request,
        best=best,
        first=first,
        prediction=request.prediction(first.layout),
        runners_up=list(_runners_up(ranking, best)) if best else [],
        remedies=[] if best and has_room(first) else _helpful(_remedies(request)),
        changes=list(_changes(request)) if best else [],
    )


def has_room(candidate: Candidate) -> bool:
    """Whether memory needs no change."""
    return candidate.out_of_memory < SAFE and not candidate.is_unstable


def sums_s(candidate: Candidate) -> dict[str, float]:
    return {name: sum(candidate.parts_s[part] for part in parts) for name, parts in SUMS.items()}


def _runners_up(ranking: Ranking, best: Sequence[Candidate]) -> Iterator[RunnerUp]:
    """The best layout of each strategy, or the one with the least memory if none fits."""
    proposed = {candidate.layout for candidate in best}
    for strategy, belongs in STRATEGIES.items():
        rows = [row for row, layout in enumerate(ranking.layouts) if belongs(layout)]
        if not rows:
            continue
        fitting = next((row for row in ranking.order if belongs(ranking.layouts[row])), None)
        row = min(rows, key=lambda one: ranking.found.peak_gib[one]) if fitting is None else fitting
        candidate = ranking.candidate(row)
        if candidate.layout not in proposed:
            yield RunnerUp(strategy, candidate, *_cause(candidate, best[0], fitting is not None))


def _cause(candidate: Candidate, best: Candidate, fits: bool) -> tuple[str, float]:
    if not fits:
        return "memory", 0.0
    if candidate.is_unstable and not best.is_unstable:
        return "unstable", 0.0
    seconds, best_seconds = sums_s(candidate), sums_s(best)
    lost = {name: seconds[name] - best_seconds[name] for name in SUMS}
    cause = max(lost, key=lambda name: lost[name])
    return cause, lost[cause]


def answer_change(name: str, request: Request, *, with_room: bool = False) -> Change:
    """The best layout of another request, of those with room to spare if there are any; None if nothing fits."""
    try:
        ranking = request.ranking()
    except ValueError:
        return Change(name, request, None)
    fitting = (ranking.candidate(row) for row in ranking.order)
    best = next(fitting, None)
    roomy = next((one for one in fitting if has_room(one)), best) if with_room and best and not has_room(best) else best
    return Change(name, request, roomy)


def _remedies(request: Request) -> Iterator[Change]:
    """Changes to try: fixed values, more GPUs, GPUs with more memory, 16-bit states, shorter sequences."""
    answered = partial(answer_change, with_room=True)
    for name, value in request.fixed.items():
        others = {other: fixed for other, fixed in request.fixed.items() if other != name}
        yield answered(f"not {name.replace('_', '-')} {value}", replace(request, fixed=others))
    free = replace(request, fixed={name: value for name, value in request.fixed.items() if name != "dp"})
    more = (factor * request.gpus for factor in GPU_FACTORS)
    yield from _first_with_room(answered(f"{gpus} GPUs", replace(free, gpus=gpus)) for gpus in more)
    larger = (HARDWARE[name] for name in LARGER if HARDWARE[name].memory_gib > request.hardware.memory_gib)
    yield from _first_with_room(
        answered(f"{request.gpus} x {card.name}", replace(request, hardware=_replace_card(request.hardware, card)))
        for card in larger
    )
    lean = {**request.fixed, "options": frozenset({"low_precision_master"})}
    yield answered("optimizer states in 16 bits", replace(request, fixed=lean))
    if request.seq_len % 2 == 0:
        shorter = replace(request, seq_len=request.seq_len // 2, global_batch=2 * request.global_batch)
        yield answered(f"sequences of {shorter.seq_len}", shorter)


def _helpful(changes: Iterable[Change]) -> list[Change]:
    """Changes that leave room to spare; if there are none, changes that fit."""
    fitting = [change for change in changes if change.candidate]
    return [change for change in fitting if change.candidate and has_room(change.candidate)] or fitting


def _replace_card(present: Hardware, card: Hardware) -> Hardware:
    """Another GPU in the same nodes and network."""
    return card.with_network(network_gbps=present.network_gbps, gpus_per_node=present.gpus_per_node)


def _first_with_room(changes: Iterator[Change]) -> Iterator[Change]:
    if change := next((one for one in changes if one.candidate and has_room(one.candidate)), None):
        yield change


def _changes(request: Request) -> Iterator[Change]:
    """Variations of the network, the number of GPUs, the sequence, and the precision."""
    network = request.hardware.network_gbps
    if request.gpus > request.hardware.gpus_per_node:
        for name, factor in (("network twice as fast", 2.0), ("network ten times slower", 0.1)):
            faster = request.hardware.with_network(network_gbps=factor * network)
            yield answer_change(name, replace(request, hardware=faster))
    if request.gpus % 2 == 0:
        yield answer_change("half the GPUs", replace(request, gpus=request.gpus // 2))
    yield answer_change("twice the GPUs", replace(request, gpus=2 * request.gpus))
    if request.global_batch % 2 == 0:
        longer = replace(request, seq_len=2 * request.seq_len, global_batch=request.global_batch // 2)
        yield answer_change("sequences twice as long", longer)
        yield answer_change("half the tokens per step", replace(request, global_batch=request.global_batch // 2))
    if request.precision != "fp8" and request.hardware.fp8_ratio > 1:
        yield answer_change("fp8 matmuls", replace(request, precision="fp8"))

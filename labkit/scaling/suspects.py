"""What may make a training slower than predicted, the quickest to check first, and the MFU that each would leave.

A suspect that comes in degrees (how small a batch is, say) is taken at its worst; what the reader named is none.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from labkit.scaling.advice import SUMS, Request, sums_s
from labkit.scaling.constants import Profile
from labkit.scaling.hardware import HARDWARE
from labkit.scaling.layout import Layout
from labkit.scaling.model import parameters
from labkit.scaling.named_models import NAMED
from labkit.scaling.search import Candidate, Ranking

TENSOR_CORES = 16.0
"""bf16 tensor cores over float32 units: 312 / 19.5 on A100, 989 / 67 on H100."""
PCIE_GB_S = 25.0
SHORTEST = 512
"""Tokens of a sequence that may have been left as some program's default."""
SLOWEST_WHEN_FULL = 8.0
"""Published runs (nanotron's) whose memory is nearly full are up to this many times slow."""
MATTERS = 0.97
"""Of the predicted MFU: what leaves more of it is no suspect."""
DEGREES = ("tp", "pp", "cp", "dp", "shard")
_SMALLER = ("gpt-3-125m", "gpt-3-350m", "gpt-3-760m", "gpt-3-1.3b", "gpt-3-2.7b", "gpt-3-6.7b", "gpt-3-13b")


@dataclass(frozen=True)
class Suspect:
    """`mfu` is what is left with it, 0 to 1, at its worst if it comes in degrees; `low` and `high` the 90 % interval.

    `check` is what tells, a command or an action; `part` the sum of `advice.SUMS` that grows most, if it is one.
    """

    name: str
    check: str
    mfu: float
    low: float
    high: float
    is_graded: bool = False
    part: str | None = None


def suspects_of(
    request: Request, ranking: Ranking, expected: Candidate, unnamed: Collection[str], *, has_throughput: bool
) -> Iterator[Suspect]:
    """Those that would make a difference; `has_throughput`: tokens per second were measured, not only an MFU."""
    case = _Case(request, ranking, expected, unnamed)
    for suspect in (
        *_counted_otherwise(case, has_throughput),
        *_left_open(case),
        *_outside(case),
        *_faults(case),
    ):
        if suspect.mfu < MATTERS * expected.mfu:
            yield suspect


@dataclass(frozen=True)
class _Case:
    request: Request
    ranking: Ranking
    expected: Candidate
    unnamed: Collection[str]

    def of(self, name: str, check: str, request: Request, layout: Layout | None, is_graded: bool = False) -> Suspect:
        """The suspect that another request is; its best layout if none is given. ValueError if it is impossible."""
        fixed = request.fixed if layout is None else _all_fixed(layout)
        ranking = replace(request, fixed=fixed).ranking()
        candidate = ranking.candidate(ranking.order[0] if ranking.order and layout is None else 0)
        peaks = request.hardware.peak_tflops / self.request.hardware.peak_tflops
        return self.seen(name, check, candidate, peaks, is_graded)

    def seen(self, name: str, check: str, candidate: Candidate, peaks: float = 1.0, is_graded: bool = True) -> Suspect:
        own, usual = sums_s(candidate), sums_s(self.expected)
        share = {sum_: own[sum_] / candidate.step_s * self._slower(candidate, peaks) for sum_ in SUMS}
        part = max(SUMS, key=lambda sum_: share[sum_] - usual[sum_] / self.expected.step_s)
        mfu, (fast, slow) = candidate.mfu * peaks, candidate.interval_90
        return Suspect(name, check, mfu, mfu * candidate.step_s / slow, mfu * candidate.step_s / fast, is_graded, part)

    def _slower(self, candidate: Candidate, peaks: float) -> float:
        """Seconds that a unit of work takes, over those predicted."""
        return self.expected.mfu / (candidate.mfu * peaks)

    def times(self, name: str, check: str, slower: float, is_graded: bool = False) -> Suspect:
        """A suspect that no formula predicts: so many times slower."""
        fast, slow = self.expected.interval_90
        mfu = self.expected.mfu / slower
        return Suspect(
            name, check, mfu, mfu * self.expected.step_s / slow, mfu * self.expected.step_s / fast, is_graded
        )


def _counted_otherwise(case: _Case, has_throughput: bool) -> Iterator[Suspect]:
    """The same step under another number: what is counted, and over what."""
    request = case.request
    peak = request.hardware.peak_tflops
    if has_throughput:
        if request.gpus > 1:
            yield case.times("tokens per second of one GPU, not of all", f"multiply by {request.gpus}", request.gpus)
        return
    yield case.times("MFU over the peak with sparsity", f"divide by {peak:g} TFLOP/s", 2.0)
    smaller = [found for name in _SMALLER if (found := _smaller_model(case, name)) is not None]
    if smaller:
        yield min(smaller, key=lambda one: one.mfu)


def _smaller_model(case: _Case, name: str) -> Suspect | None:
    """What a program shows that built a smaller model than was meant, and counts the FLOPs of that one."""
    request, model = case.request, NAMED[name]
    if parameters(model) > parameters(request.model) / 2:
        return None
    kept = {"micro_batch": case.expected.layout.micro_batch, "recompute": case.expected.layout.recompute}
    built = replace(request, model=model, fixed=dict(request.fixed) | kept)
    told = f"a smaller model is built: {name}, say"
    try:
        return case.of(told, "add --tokens-per-second", built, None, is_graded=True)
    except ValueError:
        return None


def _left_open(case: _Case) -> Iterator[Suspect]:
    """What the reader did not name and the prediction took the usual or the best of, at its worst."""
    request, layout = case.request, case.expected.layout
    small = {
        "sequence": f"sequences of {SHORTEST}" if "sequence" in case.unnamed else "",
        "micro_batch": "one at a time" if "micro_batch" not in request.fixed else "",
    }
    if any(small.values()):
        seq_len = min(SHORTEST, request.seq_len) if small["sequence"] else request.seq_len
        short = replace(request, seq_len=seq_len, global_batch=request.tokens // seq_len)
        micro_batch = 1 if small["micro_batch"] else layout.micro_batch
        batch = replace(layout, micro_batch=micro_batch, global_batch=short.global_batch)
        told = " and ".join(f"--{name.replace('_', '-')}" for name, text in small.items() if text)
        name = "little work at once: " + ", ".join(text for text in small.values() if text)
        yield case.of(name, f"add {told}", short, batch, is_graded=True)
    if "tokens_per_step" in case.unnamed:
        least = layout.dp * layout.micro_batch
        few = replace(request, global_batch=least)
        name = f"few tokens per step: {least * request.seq_len:,}, nothing accumulated"
        yield case.of(name, "add --tokens-per-step", few, replace(layout, global_batch=least), is_graded=True)
    if not set(DEGREES) <= set(request.fixed):
        ranking = case.ranking
        alike = [row for row in ranking.order if ranking.layouts[row].micro_batch == layout.micro_batch]
        alike = [row for row in alike if ranking.layouts[row].recompute == layout.recompute]
        if alike:
            worst = ranking.candidate(max(alike, key=lambda row: float(ranking.found.step_s[row])))
            degrees = [f"{name} {getattr(worst.layout, name)}" for name in DEGREES if _is_set(worst.layout, name)]
            yield case.seen(f"an arrangement that suits less: {', '.join(degrees)}", "add --tp, --pp, --shard", worst)
    if "recompute" not in request.fixed and layout.recompute != "full":
        recomputed = replace(layout, recompute="full")
        yield case.of("every layer recomputed", "add --recompute", request, recomputed)


def _is_set(layout: Layout, name: str) -> bool:
    return getattr(layout, name) not in (1, "none")


def _outside(case: _Case) -> Iterator[Suspect]:
    """What no formula here predicts, at the worst that was published; and what the formulas themselves are off by."""
    yield Suspect(
        "data that arrives late, work between steps",
        "repeat one batch",
        *(0.0, 0.0, case.expected.mfu),
        is_graded=True,
    )
    if "micro_batch" not in case.request.fixed or case.expected.is_unstable:
        name = f"memory nearly full (published: up to {SLOWEST_WHEN_FULL:g} times slow)"
        yield case.times(name, "torch.cuda.memory_stats()", SLOWEST_WHEN_FULL, is_graded=True)
    slowest = case.expected.interval_90[1] / case.expected.step_s
    yield case.times("this prediction is too fast", "add --framework or --calibrate", slowest, is_graded=True)


def _faults(case: _Case) -> Iterator[Suspect]:
    """Faults of the machine or the program that change a number of the prediction."""
    request, layout, hardware = case.request, case.expected.layout, case.request.hardware

    def on(name: str, lab: str, is_graded: bool = False, **changes: Any) -> Suspect:
        changed = replace(request, hardware=replace(hardware, **changes))
        return case.of(name, f"labkit report {lab}", changed, layout, is_graded)

    def constant(name: str, lab: str, is_graded: bool = False, **factors: float) -> Suspect:
        return case.of(name, f"labkit report {lab}", _with_constants(request, factors), layout, is_graded)

    slower = HARDWARE.get(hardware.name.replace("-SXM-", "-PCIe-"))
    if slower is not None and slower.name != hardware.name:
        other = replace(request, hardware=slower.linked(gpus_per_node=hardware.gpus_per_node))
        yield case.of(f"the card is an {slower.name}", "labkit doctor", other, layout)
    if hardware.architecture not in ("volta", "cdna2"):
        tf32 = hardware.peak_tflops / 2
        yield _by_own_peak(case, "products in TF32 instead of 16 bits", tf32)
    yield _by_own_peak(case, "products in float32, no tensor cores", hardware.peak_tflops / TENSOR_CORES)
    yield constant("attention that writes its scores to memory", "flash_attention", unfused_attention=0.0)
    yield constant("more CPU time per layer, up to five times", "kernels", True, launch_s=5.0)
    halved = hardware.clock_share / 2
    yield on("heat or a power cap, down to half the clock", "limits", True, clock_share=halved)
    if request.gpus > 1 and hardware.link_gb_s > PCIE_GB_S:
        yield on("no NVLink: GPUs that talk over PCIe", "all_reduce", link_gb_s=PCIE_GB_S)
    if request.gpus > hardware.gpus_per_node:
        tenth = hardware.network_gbps / 10
        yield on("a slower network, down to a tenth", "all_reduce", True, network_gbps=tenth)


def _by_own_peak(case: _Case, name: str, peak_tflops: float) -> Suspect:
    changed = replace(case.request, hardware=replace(case.request.hardware, peak_tflops=peak_tflops))
    return case.of(name, "labkit report precision", changed, case.expected.layout)


def _all_fixed(layout: Layout) -> dict[str, object]:
    names = ("tp", "pp", "cp", "dp", "vp", "shard", "micro_batch", "recompute", "options")
    return {name: getattr(layout, name) for name in names}


def _with_constants(request: Request, factors: dict[str, float]) -> Request:
    """The request with a framework that differs in these constants; a factor of 0 sets a switch."""
    name, constants = "with a fault", request.constants
    rows = constants.rows(request.ranking().runs.take([0]))
    values = {quantity: factor * float(rows[quantity][0]) or 1.0 for quantity, factor in factors.items()}
    known = constants.with_profile(Profile(name, request.framework, values))
    return replace(request, constants=known, framework=name)

"""Why a training is slower than expected: conventions, the prediction, and which single fault would explain it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.scaling.advice import Request, sums_s
from labkit.scaling.constants import Profile
from labkit.scaling.layout import Layout
from labkit.scaling.model import layer_parameters, parameters, step_flops
from labkit.scaling.search import Candidate

SAME = 0.1
"""Reported and computed MFU within this share are the same number."""
TENSOR_CORES = 16.0
"""bf16 tensor cores over float32 units: 312 / 19.5 on A100, 989 / 67 on H100."""
PCIE_GB_S = 25.0
EXPLAINED = 0.15
"""A fault explains a step that it predicts to this share."""


@dataclass(frozen=True)
class Convention:
    """One way to print MFU, and what it makes of this throughput, 0 to 1."""

    name: str
    mfu: float


@dataclass(frozen=True)
class Suspect:
    """A fault, the step it would cause, and the lab that measures it."""

    name: str
    lab: str
    candidate: Candidate


@dataclass(frozen=True)
class Explanation:
    """`step_s` is what was measured; `reported_mfu` what the reader printed, if that was given."""

    request: Request
    expected: Candidate
    step_s: float
    conventions: Sequence[Convention]
    reported_mfu: float | None
    parameters_implied: float | None
    """Of a model for which throughput and reported MFU agree; None unless both are given and no convention fits."""
    suspects: Sequence[Suspect]
    """The nearest to what was measured first."""

    @property
    def is_expected(self) -> bool:
        """Whether the measured step lies in the 90 % interval."""
        low, high = self.expected.interval_90
        return low <= self.step_s <= high

    @property
    def convention(self) -> Convention | None:
        """The convention that gives the reported MFU; None if none does or none was reported."""
        if self.reported_mfu is None:
            return None
        near = min(self.conventions, key=lambda one: abs(one.mfu / (self.reported_mfu or 1.0) - 1))
        return near if abs(near.mfu / self.reported_mfu - 1) <= SAME else None

    @property
    def culprit(self) -> Suspect | None:
        """The fault that explains the step by itself; None if none does."""
        nearest = self.suspects[0] if self.suspects else None
        return nearest if nearest and abs(nearest.candidate.step_s / self.step_s - 1) <= EXPLAINED else None

    @property
    def grown(self) -> str:
        """The sum of `advice.SUMS` that grows most under the nearest fault."""
        own, usual = sums_s(self.suspects[0].candidate), sums_s(self.expected)
        return max(own, key=lambda name: own[name] - usual[name])


def explain(request: Request, *, tokens_per_s: float | None = None, mfu: float | None = None) -> Explanation:
    """Why this throughput, or this MFU by labkit's convention. ValueError for neither, or an impossible layout."""
    if not any(value is not None and 0 < value < float("inf") for value in (tokens_per_s, mfu)):
        raise ValueError("expected the tokens per second or the MFU that was measured, above zero")
    ranking = request.ranking()
    expected = ranking.candidate(ranking.order[0]) if ranking.order else ranking.leanest()
    step_s = request.tokens / tokens_per_s if tokens_per_s else expected.step_s * expected.mfu / (mfu or 1.0)
    own = expected.mfu * expected.step_s / step_s
    conventions = list(_conventions(request, expected.layout, own))
    suspects = sorted(_suspects(request, expected), key=lambda one: _apart(one.candidate.step_s, step_s))
    found = Explanation(request, expected, step_s, conventions, mfu, None, suspects)
    if mfu and tokens_per_s and found.convention is None:
        found = replace(found, parameters_implied=parameters(request.model) * mfu / own)
    return found


def _apart(first: float, second: float) -> float:
    return max(first / second, second / first)


def _conventions(request: Request, layout: Layout, own: float) -> Iterator[Convention]:
    model, seq_len = request.model, request.seq_len
    whole, causal = (step_flops(model, seq_len=seq_len, sequences=1, causal=half) / seq_len for half in (False, True))
    yield Convention("6 FLOPs a parameter and all attention scores, dense peak", own)
    yield Convention("only the causal half of the scores", own * causal / whole)
    yield Convention("6 FLOPs a parameter, no attention", own * 6 * parameters(model) / whole)
    if layout.recompute == "full":
        again = 2 * model.layers * (layer_parameters(model) + 2 * model.hidden * seq_len)
        yield Convention("recomputation counted (hardware FLOPs)", own * (whole + again) / whole)
    yield Convention("over the peak with sparsity, twice the dense one", own / 2)


def _suspects(request: Request, expected: Candidate) -> Iterator[Suspect]:
    """Steps under one fault each; only those that make a difference."""
    for name, lab, fault in _faults(request, expected.layout):
        changed, layout = fault(request)
        faulty = replace(changed, fixed=_all_fixed(layout))
        candidate = faulty.ranking().candidate(0)
        if candidate.step_s > 1.05 * expected.step_s:
            yield Suspect(name, lab, candidate)


def _all_fixed(layout: Layout) -> dict[str, object]:
    names = ("tp", "pp", "cp", "dp", "vp", "shard", "micro_batch", "recompute", "options")
    return {name: getattr(layout, name) for name in names}


_Fault = Callable[[Request], tuple[Request, Layout]]


def _faults(request: Request, layout: Layout) -> Iterator[tuple[str, str, _Fault]]:
    hardware = request.hardware

    def on(**changes: Any) -> _Fault:
        return lambda one: (replace(one, hardware=replace(hardware, **changes)), layout)

    def constant(**factors: float) -> _Fault:
        return lambda one: (_with_constants(one, factors), layout)

    if hardware.architecture not in ("volta", "cdna2"):
        yield "products in TF32 instead of 16 bits", "precision", on(peak_tflops=hardware.peak_tflops / 2)
    yield "products in float32, no tensor cores", "precision", on(peak_tflops=hardware.peak_tflops / TENSOR_CORES)
    yield "half the clock: heat or a power cap", "end_to_end", on(clock_share=hardware.clock_share / 2)
    yield "attention that writes its scores to memory", "flash_attention", constant(unfused_attention=0.0)
    yield "five times the CPU time per layer", "kernels", constant(launch_s=5.0)
    if request.gpus > 1 and hardware.link_gb_s > PCIE_GB_S:
        yield "no NVLink: GPUs that talk over PCIe", "all_reduce", on(link_gb_s=PCIE_GB_S)
    if request.gpus > hardware.gpus_per_node:
        yield "a tenth of the network: sockets, one link", "all_reduce", on(network_gbps=hardware.network_gbps / 10)
    if layout.recompute != "full":
        yield "every layer recomputed", "memory", lambda one: (one, replace(layout, recompute="full"))
    if layout.micro_batch > 1:
        yield "a micro-batch of 1", "memory", lambda one: (one, replace(layout, micro_batch=1))


def _with_constants(request: Request, factors: dict[str, float]) -> Request:
    """The request with a framework that differs in these constants; a factor of 0 sets a switch."""
    name, constants = "with a fault", request.constants
    rows = constants.rows(request.ranking().runs.take([0]))
    values = {quantity: factor * float(rows[quantity][0]) or 1.0 for quantity, factor in factors.items()}
    known = constants.with_profile(Profile(name, request.framework, values))
    return replace(request, constants=known, framework=name)

"""Why a training is slower than predicted: conventions, and the six likeliest causes.

The causes are those that public threads name most.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from labkit.scaling.models import step_flops
from labkit.scaling.prediction import Prediction, predict
from labkit.scaling.runs import Layout
from labkit.scaling.search import Request, rank

SAME = 0.1
"""Reported and computed MFU within this share are the same number."""
FLOAT32_SLOWER = 16.0
"""bf16 tensor cores over float32 units: 312 / 19.5 on A100, 989 / 67 on H100."""
PCIE_GB_S = 25.0
SHORT_SEQUENCE = 512
"""Tokens per sequence that a program may have as its default."""
MATTERS = 0.97
"""Share of the predicted MFU; what leaves more is no cause."""


@dataclass(frozen=True)
class Cause:
    """A possible cause, how to check it, and the MFU that it leaves at its worst, 0 to 1."""

    name: str
    check: str
    mfu: float


@dataclass(frozen=True)
class Diagnosis:
    """A measured step against its prediction."""

    request: Request
    expected: Prediction
    step_s: float
    mfu: float
    """Measured, by labkit's convention."""
    conventions: Mapping[str, float]
    """Ways to count MFU, labkit's first, and this throughput by each."""
    reported_mfu: float | None
    causes: Sequence[Cause] = ()
    """Causes that could explain everything first, then by the share that they explain."""

    @property
    def interval_mfu(self) -> tuple[float, float]:
        """The 90% interval of the predicted MFU."""
        low_s, high_s = self.expected.interval_90
        flops = self.expected.mfu * self.expected.step_s
        return flops / high_s, flops / low_s

    @property
    def convention(self) -> str | None:
        """The convention that gives the reported MFU; None if none does or none was reported."""
        reported = self.reported_mfu
        errors = (
            {name: abs(mfu / reported - 1) for name, mfu in self.conventions.items()}
            if reported
            else {}
        )
        return min(
            (name for name in errors if errors[name] <= SAME), key=errors.__getitem__, default=None
        )

    def share(self, cause: Cause) -> float:
        """Share of the lost seconds that this cause explains at its worst, 0 to 1."""
        if cause.mfu <= self.mfu:
            return 1.0
        usual = self.expected.mfu
        return max((1 / cause.mfu - 1 / usual) / (1 / self.mfu - 1 / usual), 0.0)


def explain(
    request: Request,
    *,
    tokens_per_s: float | None = None,
    mfu: float | None = None,
    unspecified: Collection[str] = (),
) -> Diagnosis:
    """Diagnosis of this throughput, or of this MFU by labkit's convention.

    ValueError if both are missing, or for an impossible layout.
    """
    if not any(value is not None and 0 < value < float("inf") for value in (tokens_per_s, mfu)):
        raise ValueError("expected the tokens per second or the MFU that was measured, above zero")
    expected = rank(request).first()
    step_s = (
        request.tokens / tokens_per_s
        if tokens_per_s
        else expected.step_s * expected.mfu / (mfu or 1.0)
    )
    measured = expected.mfu * expected.step_s / step_s
    conventions = _conventions(request, expected.layout, measured)
    reported = mfu if tokens_per_s else None
    diagnosis = Diagnosis(request, expected, step_s, measured, conventions, reported)
    if measured >= expected.mfu:
        return diagnosis
    causes = [
        cause
        for cause in _causes(request, expected, unspecified)
        if cause.mfu < MATTERS * expected.mfu
    ]
    return replace(diagnosis, causes=sorted(causes, key=lambda cause: -diagnosis.share(cause)))


def _conventions(request: Request, layout: Layout, measured: float) -> dict[str, float]:
    """MFU from 0 to 1 by each way to count it."""
    model = request.model
    seq_len = request.seq_len
    whole, causal = (
        step_flops(model, seq_len=seq_len, sequences=1, causal=half) / seq_len
        for half in (False, True)
    )
    again = 2 * model.layers * (model.layer_parameters + 2 * model.hidden * seq_len)
    shares = {
        "6 FLOPs per parameter and all attention scores, dense peak": 1.0,
        "only the causal half of the scores": causal / whole,
        "6 FLOPs per parameter, no attention": 6 * model.parameters / whole,
        **(
            {"recomputation counted (hardware FLOPs)": 1 + again / whole}
            if layout.recompute == "full"
            else {}
        ),
        "over the peak with sparsity, twice the dense one": 0.5,
    }
    return {name: float(measured * share) for name, share in shares.items()}


def _causes(
    request: Request, expected: Prediction, unspecified: Collection[str]
) -> Iterator[Cause]:
    layout = expected.layout
    hardware = request.hardware
    fixed = request.fixed

    def cause(name: str, check: str, changed: Request, layout: Layout = layout) -> Cause:
        return Cause(name, check, predict(changed.run(layout), changed.constants).mfu)

    yield Cause("data that arrives late, work between steps", "repeat one batch", 0.0)
    options = ["sequence"] * ("sequence" in unspecified) + ["micro_batch"] * (
        "micro_batch" not in fixed
    )
    if options:
        seq_len = min(SHORT_SEQUENCE, request.seq_len) if "sequence" in options else request.seq_len
        short = replace(request, seq_len=seq_len, global_batch=request.tokens // seq_len)
        micro_batch = 1 if "micro_batch" in options else layout.micro_batch
        least = replace(layout, micro_batch=micro_batch, global_batch=short.global_batch)
        check = "add " + " and ".join(f"--{name.replace('_', '-')}" for name in options)
        yield cause(
            f"little work at once: micro-batch {micro_batch}, sequences of {seq_len}",
            check,
            short,
            least,
        )
    if "recompute" not in fixed and layout.recompute != "full":
        yield cause(
            "every layer recomputed", "add --recompute", request, replace(layout, recompute="full")
        )
    slow = replace(hardware, peak_tflops=hardware.peak_tflops / FLOAT32_SLOWER)
    float32 = cause(
        "matmuls in float32, no tensor cores",
        "labkit report precision",
        replace(request, hardware=slow),
    )
    yield replace(float32, mfu=float32.mfu / FLOAT32_SLOWER)
    constants = request.constants.with_profile(
        "unfused", request.framework, {"unfused_attention": 1.0}
    )
    unfused = replace(request, constants=constants, framework="unfused")
    yield cause("attention that writes its scores to memory", "labkit report attention", unfused)
    if request.gpus > 1:
        name = "GPUs that talk over PCIe instead of NVLink"
        slower = {"link_gb_s": min(hardware.link_gb_s, PCIE_GB_S)}
        if request.gpus > hardware.gpus_per_node:
            name = f"{name}, a network down to a tenth"
            slower["network_gbps"] = hardware.network_gbps / 10
        linked = replace(request, hardware=replace(hardware, **slower))  # type: ignore[arg-type]
        yield cause(name, "labkit report all_reduce", linked)

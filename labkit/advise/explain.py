"""Why a training is slow, as numbers: its prediction, the nearest measured runs, likely causes.

The causes are those that public threads name most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from labkit.advise.request import Options, flag
from labkit.scaling.intervals import peak_s
from labkit.scaling.models import step_flops
from labkit.scaling.prediction import Prediction, predict
from labkit.scaling.published import Neighbor, nearest
from labkit.scaling.runs import Layout, Runs
from labkit.scaling.search import Request, rank

# bf16 tensor cores over float32 units: 312 / 19.5 on A100, 989 / 67 on H100.
FLOAT32_SLOWER = 16.0
PCIE_GB_S = 25.0
# A cause to check: tokens per sequence that a program may have as its default.
SHORT_SEQUENCE = 512
# Up to this distance a published run is like the user's; 1 is twice as many GPUs.
LIKE_YOURS = 4.0
# Below this factor another layout may be faster by the predictor's error alone.
FASTER = 1.1
# What leaves more than this share of the predicted MFU explains nothing that anybody would notice.
MATTERS = 0.97


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
    neighbors: Sequence[Neighbor]
    """The nearest published runs."""
    other_layout: Prediction | None
    """A layout that is clearly faster than the one that the user fixed."""
    causes: Sequence[Cause] = ()
    """Causes that could explain everything first, then by the share that they explain."""

    @property
    def neighbor_mfu(self) -> tuple[float, float] | None:
        """Least and largest MFU of the published runs like this one, by labkit's convention."""
        alike = [row.run for row in self.neighbors if row.distance <= LIKE_YOURS]
        if not alike:
            return None
        # Counted anew, since published MFUs follow several conventions.
        runs = Runs(alike)
        reached = peak_s(runs) / runs.step_s
        return float(reached.min()), float(reached.max())

    def share(self, cause: Cause) -> float:
        """Share of the lost seconds that this cause explains at its worst, 0 to 1."""
        # At its worst the step would take as long as it did, or longer.
        if cause.mfu <= self.mfu:
            return 1.0
        usual = self.expected.mfu
        return max((1 / cause.mfu - 1 / usual) / (1 / self.mfu - 1 / usual), 0.0)


def explain(request: Request, options: Options) -> Diagnosis:
    """Diagnose the tokens per second, or the MFU by labkit's convention, that were measured."""
    # Expected is what the declared network allows: a slow one that was measured is a cause.
    unmeasured = replace(request, hardware=replace(request.hardware, bus_gb_s=0.0))
    expected = rank(unmeasured).first()
    measured = (options.mfu or 0.0) / 100
    if options.tokens_per_second:
        step_s = request.tokens / options.tokens_per_second
        measured = expected.mfu * expected.step_s / step_s
    diagnosis = Diagnosis(
        request=request,
        expected=expected,
        step_s=expected.step_s * expected.mfu / measured,
        mfu=measured,
        conventions=_conventions(request, expected.layout, measured),
        neighbors=nearest(request.run(expected.layout)),
        other_layout=_faster_layout(unmeasured, expected),
    )
    if measured >= expected.mfu:  # nothing is lost that a cause could explain
        return diagnosis
    causes = [
        cause
        for cause in _causes(unmeasured, expected.layout, options)
        if cause.mfu < MATTERS * expected.mfu
    ]
    return replace(diagnosis, causes=sorted(causes, key=diagnosis.share, reverse=True))


def _faster_layout(request: Request, expected: Prediction) -> Prediction | None:
    """The best layout with no field fixed, if it is clearly faster than the best with them."""
    if not request.fixed:
        return None
    best = rank(replace(request, fixed={})).first()
    if best.may_fit and expected.step_s > FASTER * best.step_s:
        return best
    return None


def _conventions(request: Request, layout: Layout, measured: float) -> dict[str, float]:
    """MFU from 0 to 1 by each way to count it."""
    model = request.model
    seq_len = request.seq_len
    all_scores = step_flops(model, seq_len=seq_len, sequences=1)
    causal = step_flops(model, seq_len=seq_len, sequences=1, causal=True)
    shares = {
        "6 FLOPs per parameter and all attention scores, dense peak": 1.0,
        "only the causal half of the scores": causal / all_scores,
        "6 FLOPs per parameter, no attention": 6 * model.parameters * seq_len / all_scores,
        "over the peak with sparsity, twice the dense one": 0.5,
    }
    # Full recomputation repeats the layers' forward pass, a third of what the head leaves.
    if layout.recompute == "full":
        head = 6 * model.embedding_parameters * seq_len
        shares["recomputation counted (hardware FLOPs)"] = 1 + (1 - head / all_scores) / 3
    return {name: measured * share for name, share in shares.items()}


def _causes(request: Request, layout: Layout, options: Options) -> Iterator[Cause]:
    hardware = request.hardware

    def cause(name: str, check: str, changed: Request, layout: Layout = layout) -> Cause:
        return Cause(name, check, predict(changed.run(layout), changed.constants).mfu)

    # The predictor knows no input pipeline: at its worst it explains any loss.
    yield Cause("data that arrives late, work between steps", "repeat one batch", 0.0)
    # What the user did not state may be smaller than what the prediction took for it.
    seq_len = request.seq_len
    if options.sequence is None:
        seq_len = min(SHORT_SEQUENCE, seq_len)
    micro_batch = options.micro_batch or 1
    unset = [name for name in ("sequence", "micro_batch") if not options.named(name)]
    if unset:
        name = f"little work at once: micro-batch {micro_batch}, sequences of {seq_len}"
        short = replace(request, seq_len=seq_len, global_batch=request.tokens // seq_len)
        least = replace(layout, micro_batch=micro_batch, global_batch=short.global_batch)
        yield cause(name, f"state {' and '.join(map(flag, unset))}", short, least)
    if options.recompute is None and layout.recompute != "full":
        full = replace(layout, recompute="full")
        yield cause("every layer recomputed", "state --recompute", request, full)
    slow = replace(hardware, matmul_tflops=hardware.matmul_tflops / FLOAT32_SLOWER)
    float32 = replace(request, hardware=slow)
    yield cause("matmuls in float32, no tensor cores", "labkit report precision", float32)
    constants = request.constants.with_profile(
        "unfused", request.framework, {"unfused_attention": 1.0}
    )
    unfused = replace(request, constants=constants, framework="unfused")
    yield cause("attention that writes its scores to memory", "labkit report attention", unfused)
    if request.gpus > 1:
        name, slower = _slow_network(request, options.measured_bus_bandwidth)
        yield cause(name, "labkit report all_reduce; nccl-tests between nodes", slower)


def _slow_network(request: Request, bus_gb_s: float | None) -> tuple[str, Request]:
    """A cause's name, and the request with the measured bandwidth, or a tenth of the network."""
    hardware = request.hardware
    if bus_gb_s:
        declared_gb_s = hardware.network_gbps / 8
        name = f"an all-reduce at {bus_gb_s:.0f} GB/s, {declared_gb_s:.0f} expected at most"
        return name, replace(request, hardware=replace(hardware, bus_gb_s=bus_gb_s))
    # Nobody measured: links inside a node may be at fault as well.
    slow = replace(
        hardware,
        link_gb_s=min(hardware.link_gb_s, PCIE_GB_S),
        network_gbps=hardware.network_gbps / 10,
    )
    name = "GPUs that talk over PCIe instead of NVLink"
    if request.gpus > hardware.gpus_per_node:
        name += ", a network down to a tenth"
    return name, replace(request, hardware=slow)

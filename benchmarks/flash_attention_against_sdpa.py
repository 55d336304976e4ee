"""Time of PyTorch's SDPA, each backend forced, over time of labkit's FlashAttention; bf16, one process, interleaved.

    python benchmarks/flash_attention_against_sdpa.py                  # the promises: exits 1 if one is missed
    python benchmarks/flash_attention_against_sdpa.py --output ratios.jsonl --repeats 30

Needs a CUDA GPU.  The targets are for H100 and H200; on another GPU the ratios are printed beside them all the same.
Problems as in the FlashAttention-2 paper: 16384 tokens a batch and 2048 features, so 16384 / sequence batches and
2048 / head_dim heads.  A ratio above 1 means that labkit is faster.  An implementation whose values or gradients are
wrong gets no time; a backend that refuses a problem is recorded as such.  A sample is the mean of several calls, so
that the queueing of work is hidden behind the device's; the median of the samples counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.bench.clock import time_interleaved
from labkit.bench.memory import peak_memory_growth
from labkit.nn.attention import Attention, naive_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS

DTYPE = torch.bfloat16
TOKENS, FEATURES = 16384, 2048
SEQUENCES = (4096, 8192, 16384)
HEAD_DIMS = (64, 128)
BACKENDS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa")
OWN = "flash"
CALLS = 10
WARMUP = 3  # samples; autotuning and cuDNN's own choice happen before, in the gate and in the first call

# error of a bf16 result relative to the float64 one, as root mean squares: three roundings to 8 bits, with room
LARGEST_RELATIVE_ERROR = 2**-7

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One comparison: SDPA's time over ours (`ratio`), and the target where there is one."""

    what: str
    against: str
    head_dim: int
    sequence: int
    causal: bool
    status: str
    own_ms: float | None = None
    other_ms: float | None = None
    ratio: float | None = None
    target: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or (self.ratio is not None and self.ratio >= self.target)

    def __str__(self) -> str:
        head = f"{self.what:8} {self.against:14} d{self.head_dim:<3} {self.sequence:6} "
        head += "causal " if self.causal else "full   "
        if self.ratio is None:
            return head + self.status
        target = "" if self.target is None else f"  target {self.target:.2f} {'met' if self.met else 'MISSED'}"
        return head + f"{self.own_ms:8.3f} ms  {self.other_ms:8.3f} ms  ratio {self.ratio:.2f}{target}"


def target_for(what: str, against: str, head_dim: int, causal: bool) -> float | None:
    """The smallest ratio promised on H100 and H200."""
    if (what, against) == ("forward", "sdpa_flash"):
        return 1.1 if causal else 1.15
    if (what, against) == ("forward", "sdpa_cudnn"):
        return 0.95 if head_dim == 64 else 0.75
    if (what, against) == ("backward", "sdpa_flash"):
        return 1.0 if head_dim == 64 else 0.9
    return None


# ------------------------------------------------------------------------------------ correctness gate


def check_correctness(name: str, head_dim: int, causal: bool) -> str | None:
    """Values and gradients against float64 on a small problem with ragged blocks: what is wrong, or None."""
    tensors = _tensors((2, 2, 1000, head_dim))
    exact = _values_and_gradients(naive_attention, [x.detach().double() for x in tensors], causal)
    try:
        found = _values_and_gradients(IMPLEMENTATIONS[name].attend, tensors, causal)
    except RuntimeError as error:
        return f"unsupported: {str(error).splitlines()[0]}"
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]
    worst = max(errors)  # a NaN would hide in max
    if any(error != error or error > LARGEST_RELATIVE_ERROR for error in errors):
        return f"wrong: relative errors of output, dQ, dK, dV are {errors}"
    print(f"gate     {name:14} d{head_dim:<3} {'causal' if causal else 'full':13} relative error {worst:.1e}")
    return None


def _values_and_gradients(attend: Attention, tensors: list[Tensor], causal: bool) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    output = attend(q, k, v, causal)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]


def _tensors(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=DTYPE, generator=generator) for _ in range(4)]


# ---------------------------------------------------------------------------------------------- timing


def compare(head_dim: int, sequence: int, causal: bool, refused: dict[str, str], repeats: int) -> list[Row]:
    """Forward, backward, and both, of every backend that is not refused, taking turns with ours."""
    tensors = _tensors((TOKENS // sequence, FEATURES // head_dim, sequence, head_dim))
    names = [name for name in (OWN, *BACKENDS) if name not in refused]
    rows = []
    for what in ("forward", "backward", "both"):
        steps = {name: _step(what, IMPLEMENTATIONS[name].attend, tensors, causal) for name in names}
        ms = _median_ms(steps, repeats)
        for name in BACKENDS:
            problem = (what, name, head_dim, sequence, causal)
            if name in refused:
                rows.append(Row(*problem, status=refused[name], target=target_for(what, name, head_dim, causal)))
                continue
            target = target_for(what, name, head_dim, causal)
            rows.append(Row(*problem, "ok", ms[OWN], ms[name], ms[name] / ms[OWN], target))
        del steps
    return rows


def _step(what: str, attend: Attention, tensors: list[Tensor], causal: bool) -> Step:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    grad = tensors[3]
    if what == "forward":

        def forward() -> None:
            with torch.no_grad():
                attend(q, k, v, causal)

        return forward
    if what == "backward":
        output = attend(q, k, v, causal)
        return lambda: torch.autograd.grad(output, (q, k, v), grad, retain_graph=True)
    return lambda: torch.autograd.grad(attend(q, k, v, causal), (q, k, v), grad)


def _median_ms(steps: dict[str, Step], repeats: int, calls: int = CALLS) -> dict[str, float]:
    samples = time_interleaved(steps, warmup=WARMUP, repeats=repeats, device="cuda", calls=calls)
    return {name: 1000 * statistics.median(seconds) for name, seconds in samples.items()}


# ----------------------------------------------------------------------------------- the single promises


def course_problem(repeats: int) -> Row:
    """16 heads, d64, 16384 tokens, causal, forward and backward: at most 5.4 ms, written as a ratio to that."""
    tensors = _tensors((1, 16, 16384, 64))
    ms = _median_ms({OWN: _step("both", IMPLEMENTATIONS[OWN].attend, tensors, True)}, repeats)[OWN]
    return Row("both", "5.4 ms", 64, 16384, True, "ok", ms, 5.4, 5.4 / ms, 1.0)


def long_problem(repeats: int) -> list[Row]:
    """65536 tokens, one head of 128: at least 3.5 times as fast as explicit, with less than 1 GB extra."""
    tensors = _tensors((1, 1, 65536, 128))
    problem = ("both", "explicit", 128, 65536, True)
    steps = {name: _step("both", IMPLEMENTATIONS[name].attend, tensors, True) for name in (OWN, "explicit")}
    steps[OWN]()  # autotuning has buffers of its own
    with peak_memory_growth("cuda") as peak:
        steps[OWN]()
    assert peak.growth_bytes is not None
    gb = peak.growth_bytes / 1e9
    memory = Row("extra", "1 GB", 128, 65536, True, "ok", gb, 1.0, 1.0 / gb, 1.0)
    print(f"extra memory of flash at 65536: {gb:.3f} GB (the next line has GB in place of ms)")
    try:
        ms = _median_ms(steps, repeats, calls=1)
    except torch.cuda.OutOfMemoryError:
        return [memory, Row(*problem, status="explicit runs out of memory", target=3.5)]
    return [memory, Row(*problem, "ok", ms[OWN], ms["explicit"], ms["explicit"] / ms[OWN], 3.5)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="samples of each implementation")
    parser.add_argument("--output", type=Path, help="append a JSON line a comparison to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: the Triton kernels do not run on a CPU, and its timings would mean nothing")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; own time, other's time, other / own")
    missed = 0
    for row in _all_rows(options.repeats):
        print(row, flush=True)
        missed += not row.met
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps({"device": torch.cuda.get_device_name(), **asdict(row)}) + "\n")
    print(f"{missed} targets missed")
    return int(missed > 0)


def _all_rows(repeats: int) -> Iterator[Row]:
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            checked = {name: check_correctness(name, head_dim, causal) for name in (OWN, *BACKENDS)}
            refused = {name: reason for name, reason in checked.items() if reason is not None}
            if OWN in refused:
                sys.exit(f"{OWN} d{head_dim} is {refused[OWN]}")
            for sequence in SEQUENCES:
                yield from compare(head_dim, sequence, causal, refused, repeats)
    yield course_problem(repeats)
    yield from long_problem(repeats)


if __name__ == "__main__":
    sys.exit(main())

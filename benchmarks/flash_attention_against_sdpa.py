"""Time of PyTorch's SDPA, each backend forced, over time of labkit's FlashAttention; bf16, one process, interleaved.

    python benchmarks/flash_attention_against_sdpa.py                  # the promises: exits 1 if one is missed
    python benchmarks/flash_attention_against_sdpa.py --output ratios.jsonl --repeats 30

Needs a CUDA GPU.  The targets are for H100 and H200; on another GPU the ratios are printed all the same.  Problems as
in the FlashAttention-2 paper: 16384 tokens per batch and 2048 features, so 16384 / sequence batches and
2048 / head_dim heads.  A ratio above 1 means that labkit is faster.  Only implementations that pass the correctness
check are timed; a backend that refuses a problem is listed with the reason.  A sample is the mean of several calls, so
that queueing is hidden behind the device's work; the median of the samples counts.
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

from labkit.bench.clock import time_interleaved
from labkit.bench.memory import peak_memory_growth
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.attention_problem import AttentionProblem, Passes, check

TOKENS, FEATURES = 16384, 2048
SEQUENCES = (4096, 8192, 16384)
HEAD_DIMS = (64, 128)
BACKENDS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa")
LABKIT, NAIVE = "flash", "explicit"
PHASES = ("forward", "backward", "both")
CALLS = 10
WARMUP = 3  # samples; autotuning and cuDNN's choice happen before, in the check and in the first call


@dataclass(frozen=True)
class Row:
    """One comparison: SDPA's time over labkit's (`ratio`), and the target where there is one."""

    phase: str
    against: str
    head_dim: int
    sequence: int
    causal: bool
    status: str = "ok"
    labkit_ms: float | None = None
    other_ms: float | None = None
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.other_ms / self.labkit_ms if self.labkit_ms and self.other_ms else None

    @property
    def is_met(self) -> bool:
        return self.target is None or (self.ratio is not None and self.ratio >= self.target)

    def __str__(self) -> str:
        head = f"{self.phase:8} {self.against:14} d{self.head_dim:<3} {self.sequence:6} "
        head += "causal " if self.causal else "full   "
        if self.ratio is None:
            return head + self.status
        target = "" if self.target is None else f"  target {self.target:.2f} {'met' if self.is_met else 'MISSED'}"
        return head + f"{self.labkit_ms:8.3f} ms  {self.other_ms:8.3f} ms  ratio {self.ratio:.2f}{target}"


def target_for(phase: str, against: str, head_dim: int, causal: bool) -> float | None:
    """The smallest ratio promised on H100 and H200."""
    if (phase, against) == ("forward", "sdpa_flash"):
        return 1.1 if causal else 1.15
    if (phase, against) == ("forward", "sdpa_cudnn"):
        return 0.95 if head_dim == 64 else 0.75
    if (phase, against) == ("backward", "sdpa_flash"):
        return 1.0 if head_dim == 64 else 0.9
    return None


def _problem(batch: int, heads: int, sequence: int, head_dim: int, causal: bool) -> AttentionProblem:
    return AttentionProblem((batch, heads, sequence, head_dim), torch.bfloat16, "cuda", causal=causal)


def fault(name: str, head_dim: int, causal: bool) -> str | None:
    """Check an implementation on a small problem with ragged blocks: the reason not to time it, or None."""
    problem = _problem(2, 2, 1000, head_dim, causal)
    try:
        checked = check(problem, problem.passes(IMPLEMENTATIONS[name].attend).run_checked())
    except RuntimeError as error:
        return f"unsupported: {str(error).splitlines()[0]}"
    return None if checked.is_right else f"wrong: {checked}"


def compare(head_dim: int, sequence: int, causal: bool, faults: dict[str, str | None], repeats: int) -> Iterator[Row]:
    """Forward, backward, and both, of every backend without a fault, in turns with labkit's."""
    problem = _problem(TOKENS // sequence, FEATURES // head_dim, sequence, head_dim, causal)
    names = [name for name in (LABKIT, *BACKENDS) if not faults[name]]
    for phase in PHASES:
        ms = _median_ms({name: _step(phase, problem, name) for name in names}, repeats)
        for name in BACKENDS:
            times = faults[name] or "ok", ms[LABKIT], ms.get(name)
            yield Row(phase, name, head_dim, sequence, causal, *times, target_for(phase, name, head_dim, causal))


def _step(phase: str, problem: AttentionProblem, name: str) -> Callable[[], object]:
    attend = IMPLEMENTATIONS[name].attend
    passes = Passes(problem, attend)
    if phase == "forward":
        return torch.no_grad()(lambda: attend(*problem.inputs, problem.causal))
    if phase == "both":
        return lambda: (passes.forward(), passes.backward())
    output = attend(*problem.inputs, problem.causal)
    return lambda: torch.autograd.grad(output, problem.inputs, problem.grad_output, retain_graph=True)


def _median_ms(steps: dict[str, Callable[[], object]], repeats: int, calls: int = CALLS) -> dict[str, float]:
    samples = time_interleaved(steps, warmup=WARMUP, repeats=repeats, device="cuda", calls=calls)
    return {name: 1000 * statistics.median(seconds) for name, seconds in samples.items()}


def course_problem(repeats: int) -> Row:
    """16 heads, d64, 16384 tokens, causal, forward and backward: at most 5.4 ms, as a ratio to that."""
    steps = {LABKIT: _step("both", _problem(1, 16, 16384, 64, True), LABKIT)}
    ms = _median_ms(steps, repeats)[LABKIT]
    return Row("both", "5.4 ms", 64, 16384, True, labkit_ms=ms, other_ms=5.4, target=1.0)


def long_problem(repeats: int) -> Iterator[Row]:
    """65536 tokens, one head of 128: at least 3.5 times as fast as naive attention, with less than 1 GB extra."""
    problem = _problem(1, 1, 65536, 128, True)
    steps = {name: _step("both", problem, name) for name in (LABKIT, NAIVE)}
    steps[LABKIT]()  # autotuning has buffers of its own
    with peak_memory_growth("cuda") as peak:
        steps[LABKIT]()
    gb = (peak.growth_bytes or 0) / 1e9
    print(f"extra memory of flash at 65536: {gb:.3f} GB (the next line has GB in place of ms)")
    yield Row("extra", "1 GB", 128, 65536, True, labkit_ms=gb, other_ms=1.0, target=1.0)
    try:
        ms = _median_ms(steps, repeats, calls=1)
    except torch.OutOfMemoryError:
        yield Row("both", NAIVE, 128, 65536, True, "naive attention runs out of memory", target=3.5)
    else:
        yield Row("both", NAIVE, 128, 65536, True, labkit_ms=ms[LABKIT], other_ms=ms[NAIVE], target=3.5)


def _all_rows(repeats: int) -> Iterator[Row]:
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            faults = {name: fault(name, head_dim, causal) for name in (LABKIT, *BACKENDS)}
            if faults[LABKIT]:
                sys.exit(f"{LABKIT} d{head_dim} is {faults[LABKIT]}")
            for sequence in SEQUENCES:
                yield from compare(head_dim, sequence, causal, faults, repeats)
    yield course_problem(repeats)
    yield from long_problem(repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="samples of each implementation")
    parser.add_argument("--output", type=Path, help="append one JSON line per comparison to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU: the Triton kernels do not run on a CPU, and its timings would mean nothing")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; labkit's time, the other's, other / labkit")
    missed = 0
    for row in _all_rows(options.repeats):
        print(row, flush=True)
        missed += not row.is_met
        if options.output is not None:
            with options.output.open("a") as file:
                line = {"device": torch.cuda.get_device_name(), **asdict(row), "ratio": row.ratio}
                file.write(json.dumps(line) + "\n")
    print(f"{missed} targets missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

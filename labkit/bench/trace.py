"""What ran inside a call: its operators or GPU kernels, from `torch.profiler`, as rows to sum up.

The source is the Chrome trace that the profiler writes, a documented format: the file that a reader opens in Perfetto
holds exactly what was summed up here. Where a trace has GPU kernels, they are the events; otherwise the
operators on the host are. An event counts with its own time only: what ran inside it counts for itself, so that
sums over events are the total, and nothing is counted twice.

Named ranges (`torch.profiler.record_function`) hold whatever starts while they are open, on any thread: the backward
pass of a GPU runs in a thread of its own, while `backward()` waits for it. A kernel belongs to the ranges that were
open when it was launched.
"""

import base64
import gzip
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from labkit.bench.clock import time_interleaved
from labkit.bench.profiling import profiled

Trace = Mapping[str, Any]

HOST = ("cpu_op", "user_annotation")
RANGE = "user_annotation"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
LONGEST_NAME = 100

# Families in the order in which figures stack them. A name belongs to the first rule that finds its words in it.
FAMILIES = (
    "matmul",
    "attention",
    "softmax",
    "loss",
    "norm",
    "elementwise",
    "reduction",
    "copy",
    "optimizer",
    "dispatch",
    "other",
)
_RULES: tuple[tuple[str, str], ...] = (
    (
        "dispatch",
        r"^autograd::|^(?!aten::)\w*Backward\d*$|^torch::|^(aten::)?(linear|matmul|cross_entropy_loss|detach|dropout|lstm|gru|"
        r"conv(_transpose)?\dd|_?convolution|(max|adaptive_avg)_pool\dd|avg_pool1d)$",
    ),
    ("optimizer", r"multi_tensor_apply|_foreach_|_fused_adam|fused_adam"),
    ("attention", r"flash|fmha|scaled_dot_product|efficient_attention|attention"),
    ("loss", r"log_?softmax|nll_loss|cross_entropy"),
    ("softmax", r"softmax"),
    (
        "matmul",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|^aten::(mm|bmm|addmm|addmv|mv|dot|baddbmm)$|mkldnn_linear|"
        r"convol|conv_?(transpose|depthwise)?_?\dd|winograd|rnn_layer",
    ),
    ("norm", r"layer_?norm|rms_?norm|batch_?norm|group_?norm"),
    (
        "copy",
        r"copy|memcpy|memset|(?<!masked_)fill|zero|clone|^aten::(cat|stack|tril|triu|arange)$|catarray|index|embedding|gather|scatter",
    ),
    ("reduction", r"reduce|pool|^aten::(sum|mean|max|min|amax|amin|prod|norm|logsumexp)$"),
    (
        "dispatch",
        r"^aten::(empty|view|_unsafe_view|as_strided|reshape|_reshape|expand|transpose|t$|slice|select|unbind|unflatten|"
        r"flatten|permute|unsqueeze|squeeze|alias|resize|result_type|promote_types|to$|_to_copy|item|_local|ones|resolve_|"
        r"narrow|contiguous|new_)|^cuda|Synchronize",
    ),
    (
        "elementwise",
        r"elementwise|^aten::(mul|add|sub|div|neg|pow|square|sqrt|rsqrt|exp|log|silu|gelu|relu|sigmoid|tanh|where|"
        r"masked_fill|bitwise|logical|lerp|addcmul|addcdiv|eq|ne|lt|gt|le|ge|abs|sin|cos|clamp|threshold|maximum|minimum|"
        r"bernoulli|native_dropout|leaky_relu|elu|softplus|hardtanh|mish)"
        r"[_a-z]*$",
    ),
)


@dataclass(frozen=True)
class TraceEvent:
    """One operator or kernel. Seconds; `start_s` counts from the first event of the trace."""

    name: str
    family: str
    ranges: tuple[str, ...]
    """The named ranges around it, the outermost first."""
    start_s: float
    duration_s: float
    self_s: float
    """`duration_s` without what ran inside."""

    def within(self, ranges: Iterable[str]) -> str:
        """The innermost of `ranges` that it belongs to, or ""."""
        wanted = set(ranges)
        return next((name for name in reversed(self.ranges) if name in wanted), "")


@dataclass
class Sum:
    """Of some events: their own time in seconds, and how many there are."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Profile:
    """One profiled call."""

    trace: Trace
    seconds: float
    """Of the call by labkit's clock, while the profiler was on."""

    @cached_property
    def events(self) -> list[TraceEvent]:
        """As `read_events` has them."""
        return read_events(self.trace)

    @property
    def n_recorded(self) -> int:
        """Everything the profiler wrote down, calls of the CUDA runtime included."""
        return sum(event.get("ph") == "X" for event in self.trace["traceEvents"])


def profile_call(action: Callable[[], Any], *, device: str = "cpu", before: Callable[[], Any] | None = None) -> Profile:
    """Run `action` once under the profiler; warming up is for the caller to do before.

    `before` runs once the profiler has started, which takes ranks unequally long: a barrier. RuntimeError if a GPU was
    profiled and no kernel was seen: operators of the host must not pass for kernels.
    """
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profiled(activities) as profiler:
        seconds = time_interleaved({"call": action}, warmup=0, repeats=1, device=device, before=before)["call"][0]
    with TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = _without_names_of_the_machine(json.loads(path.read_bytes()))
    if ProfilerActivity.CUDA in activities and not has_kernels(trace):
        raise RuntimeError(
            "the profiler saw no GPU kernel: CUPTI gave none, as where only administrators may profile "
            "(NVreg_RestrictProfilingToAdminUsers), or where another profiler is at work"
        )
    return Profile(trace, seconds)


def has_kernels(trace: Trace) -> bool:
    """Whether the trace has anything that ran on a GPU."""
    return any(event.get("ph") == "X" and event.get("cat") in DEVICE for event in trace["traceEvents"])


def read_events(trace: Trace, *, also: str | None = None) -> list[TraceEvent]:
    """The events of a Chrome trace by start: kernels, copies and fills of a GPU, if there are any; else operators.

    Beside kernels, operators of the host whose names begin with `also` are there too.
    """
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    host = [event for event in complete if event.get("cat") in HOST]
    device = [event for event in complete if event.get("cat") in DEVICE]
    if device and also is not None:
        device += [event for event in host if event["name"].startswith(also)]
    events = device or host
    if not events:
        return []
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in LAUNCH and "correlation" in event.get("args", {})
    }
    starts = [launched.get(event.get("args", {}).get("correlation"), event["ts"]) for event in events]
    ranges = _ranges_at(starts, [event for event in host if event["cat"] == RANGE])
    own = [event["dur"] for event in device] if device else _self_times(host)
    first = min(event["ts"] for event in events)
    found = [
        TraceEvent(
            name=short_name(event["name"]),
            family="dispatch" if event["cat"] == RANGE else family_of(event["name"]),
            ranges=around,
            start_s=(event["ts"] - first) / 1e6,
            duration_s=event["dur"] / 1e6,
            self_s=self_us / 1e6,
        )
        for event, around, self_us in zip(events, ranges, own, strict=True)
    ]
    return sorted(found, key=lambda event: event.start_s)


def host_seconds(trace: Trace) -> float:
    """How long the host was inside named ranges, ranges within ranges counted once."""
    ranges = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == RANGE]
    total, reached = 0.0, -math.inf
    for event in sorted(ranges, key=lambda event: event["ts"]):
        total += max(0.0, _end(event) - max(reached, event["ts"]))
        reached = max(reached, _end(event))
    return total / 1e6


@cache
def family_of(name: str) -> str:
    """The family of an operator ("aten::mm") or kernel, by its name; "other" for a name that no rule knows.

    "dispatch" is what the host does around the work: views, allocations, the autograd engine, Python.
    """
    return next((family for family, pattern in _RULES if re.search(pattern, name, re.IGNORECASE)), "other")


@cache
def short_name(name: str) -> str:
    """A kernel's name without common namespaces, template arguments and parameters, at most 100 characters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    if not name.startswith(("aten::", "autograd::")) and "<" in name:
        head, _, rest = name.partition("<")
        functor = re.search(r"(\w+(?:Functor|functor|Ops|_kernel_cuda|_kernel))", rest)
        name = f"{head}<{functor[1]}>" if functor else head
    return name.partition("(")[0][:LONGEST_NAME].strip()


def encode_trace(trace: Trace) -> str:
    """A trace as text of ASCII letters (JSON, gzip, base64), small enough to travel inside a run."""
    packed = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)
    return base64.b64encode(packed).decode()


def decode_trace(text: str) -> Trace:
    """The trace that `encode_trace` packed."""
    trace: Trace = json.loads(gzip.decompress(base64.b64decode(text)))
    return trace


def _without_names_of_the_machine(trace: Trace) -> Trace:
    """What a viewer needs, without the names of the host and of temporary files."""
    needed = ("schemaVersion", "deviceProperties", "displayTimeUnit", "traceEvents")
    return {name: trace[name] for name in needed if name in trace}


def _self_times(events: list[Mapping[str, Any]]) -> list[float]:
    """Duration of each event less that of the events directly inside it, per thread; in the order given."""
    own = [float(event["dur"]) for event in events]
    order = sorted(range(len(events)), key=lambda i: (events[i]["ts"], -events[i]["dur"]))
    open_by_thread: dict[Any, list[int]] = {}
    for i in order:
        open_ones = open_by_thread.setdefault(events[i]["tid"], [])
        while open_ones and _end(events[open_ones[-1]]) <= events[i]["ts"]:
            open_ones.pop()
        if open_ones:
            own[open_ones[-1]] -= events[i]["dur"]
        open_ones.append(i)
    return [max(0.0, value) for value in own]


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _ranges_at(times: list[float], ranges: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The names of the ranges that are open at each time, the outermost first; in the order given."""
    found: list[tuple[str, ...]] = [()] * len(times)
    coming = sorted(ranges, key=lambda event: (event["ts"], -event["dur"]))
    open_ones: list[Mapping[str, Any]] = []
    for index in sorted(range(len(times)), key=times.__getitem__):
        while coming and coming[0]["ts"] <= times[index]:
            open_ones.append(coming.pop(0))
        open_ones = [event for event in open_ones if _end(event) > times[index]]
        found[index] = tuple(event["name"] for event in open_ones)
    return found


def sum_up(events: Iterable[TraceEvent], key: Callable[[TraceEvent], tuple[str, ...]]) -> dict[tuple[str, ...], Sum]:
    """Own seconds and number of the events of each `key`."""
    sums: dict[tuple[str, ...], Sum] = {}
    for event in events:
        entry = sums.setdefault(key(event), Sum())
        entry.seconds += event.self_s
        entry.calls += 1
    return sums


def longest(events: Iterable[TraceEvent], most: int) -> Iterator[TraceEvent]:
    """For a timeline: up to `most` events that are no ranges and do more than hold others, the longest first."""
    leaves = [e for e in events if e.self_s > 0.5 * e.duration_s and e.ranges[-1:] != (e.name,)]
    yield from sorted(leaves, key=lambda event: event.duration_s, reverse=True)[:most]

"""What the kernels lab keeps of a trace: the trace itself as text, the host's time, the longest events."""

import base64
import gzip
import json
import math
from collections.abc import Iterable, Iterator

from labkit.bench.trace import RANGE, Trace, TraceEvent, event_end


def host_seconds(trace: Trace) -> float:
    """How long the host was inside named ranges, ranges within ranges counted once."""
    ranges = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == RANGE]
    total, reached = 0.0, -math.inf
    for event in sorted(ranges, key=lambda event: event["ts"]):
        total += max(0.0, event_end(event) - max(reached, event["ts"]))
        reached = max(reached, event_end(event))
    return total / 1e6


def encode_trace(trace: Trace) -> str:
    """A trace as text of ASCII letters (JSON, gzip, base64), small enough to travel inside a run."""
    packed = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0)
    return base64.b64encode(packed).decode()


def decode_trace(text: str) -> Trace:
    """The trace that `encode_trace` packed."""
    trace: Trace = json.loads(gzip.decompress(base64.b64decode(text)))
    return trace


def longest(events: Iterable[TraceEvent], most: int) -> Iterator[TraceEvent]:
    """For a timeline: up to `most` events that are no ranges and do more than hold others, the longest first."""
    leaves = [e for e in events if e.self_s > 0.5 * e.duration_s and e.ranges[-1:] != (e.name,)]
    yield from sorted(leaves, key=lambda event: event.duration_s, reverse=True)[:most]

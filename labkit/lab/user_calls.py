"""Counts what a reader's code sends while it is checked: collectives, messages and bytes.

Every collective and message of torch is an operator, which a dispatch mode sees; labkit's are
recorded by `parallel.traffic`. A call is the reader's if it comes from a line of theirs: the worker
around it communicates, too. A hanging rank cannot answer, so it names each call in a file before it
makes it.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from labkit.machine.user_lines import describe_line, user_file
from labkit.parallel.traffic import Collective, recorded_traffic
from labkit.torch_private import TorchDispatchMode

if TYPE_CHECKING:
    import pandas as pd

# A rank's counts travel in a row of the run, as JSON: columns of a frame hold single values.
COLUMN = "user_calls"
LABKIT = str(Path(__file__).parents[1])
# Kinds of calls by how names of torch's operators begin, without "_": `_allgather_base_` and
# `all_gather_into_tensor_out` are all_gathers. Waits and barriers, which move no data, are allowed.
KINDS = {
    "send": "send",
    "recv": "receive",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
}


@dataclass
class Calls:
    """Calls that a reader's code made on one rank at one point."""

    calls: Counter[str] = field(default_factory=Counter)
    """Collectives and messages, by kind."""
    operators: Counter[str] = field(default_factory=Counter)
    """Operators of torch that do a task's work, by name."""
    n_bytes: int = 0
    """Sent and received."""
    input_bytes: int = 0
    """Tensors that the code was called with."""
    passes: int = 0
    most_per_pass: int = 0
    """Collectives, without messages, in one pass."""


class CallCounter(TorchDispatchMode):
    """Counts the calls of a reader's code on this rank while the mode is active."""

    def __init__(self, notes: Path | None = None) -> None:
        super().__init__()
        self.counts = Calls()
        self._notes = notes
        self._in_pass = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler at the first operator, for seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            line = _calling_line(through_labkit=False)
            # "c10d::allreduce_.overload" is an all_reduce, whichever function called it.
            plain = func.name().partition("::")[2].replace("_", "")
            kind = next((KINDS[start] for start in KINDS if plain.startswith(start)), None)
            if line and kind is not None:
                # Outputs and inputs, one of which is p times as long in a gather.
                self._add(kind, max(map(_size, args[:2])), line)
        return func(*args, **(kwargs or {}))

    def append(self, call: Collective) -> None:
        """Count a call of labkit's that comes from the reader's code (`recorded_traffic`)."""
        line = _calling_line(through_labkit=True)
        if line and call.is_payload:
            kind = "exchange"
            if call.collective != kind:
                kind = f"labkit's {call.algorithm} {call.collective}"
            self._add(kind, call.n_bytes, line)

    def _add(self, kind: str, n_bytes: int, line: str) -> None:
        counts = self.counts
        counts.calls[kind] += 1
        counts.n_bytes += n_bytes
        # Messages are not limited per pass: a ring has as many as it needs.
        if kind not in ("send", "receive", "exchange"):
            self._in_pass += 1
            counts.most_per_pass = max(counts.most_per_pass, self._in_pass)
        self._note(f"{kind}{line}")

    def _note(self, text: str) -> None:
        if self._notes is not None and dist.is_initialized():
            (self._notes / f"rank-{dist.get_rank()}").write_text(text)

    def begin_pass(self, *_: Any) -> None:
        """Count the collectives of another pass."""
        self.counts.passes += 1
        self._in_pass = 0

    def wrap(self, alternative: Callable[..., Any]) -> Callable[..., Any]:
        """Return the alternative with passes that are counted; an optimizer's class stays."""
        if isinstance(alternative, type) and issubclass(alternative, Optimizer):
            return alternative

        @wraps(alternative, updated=())
        def call(*arguments: Any, **options: Any) -> Any:
            most_before = self.counts.most_per_pass
            self.begin_pass()
            self.counts.input_bytes += _size(arguments)
            result = alternative(*arguments, **options)
            if isinstance(result, nn.Module):
                # To make it is no pass: a wrapper may broadcast each parameter once.
                self.counts.most_per_pass = most_before
                self.counts.passes -= 1
                result.register_forward_pre_hook(self.begin_pass)
            self._note("")  # it has ended
            return result

        return call

    def describe(self) -> dict[str, Any]:
        """Return the counts as a column of a row."""
        return {COLUMN: json.dumps(vars(self.counts))}


class _FunctionCounter(TorchFunctionMode):
    """Counts functions of torch that a reader's code calls."""

    # The dispatch mode does not see all of them: some are decomposed before.

    def __init__(self, parts: tuple[str, ...], counts: Counter[str]) -> None:
        super().__init__()
        self._parts = parts
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if any(part in name for part in self._parts) and _calling_line(through_labkit=False):
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_calls(noted: tuple[str, ...], notes: Path | None) -> Iterator[CallCounter]:
    """Count the calls of a reader's code within the block."""
    counter = CallCounter(notes)
    with counter, _FunctionCounter(noted, counter.counts.operators), recorded_traffic(counter):
        yield counter


def read_calls(frame: "pd.DataFrame") -> list[Calls]:
    """Read the calls of each rank from the rows of a run."""
    if COLUMN not in frame:
        return []
    return [Calls(**json.loads(text)) for text in frame[COLUMN].dropna()]


def describe_calls(calls: Iterable[Calls]) -> list[str]:
    """Describe the calls per pass of the rank that makes most; empty if no call was counted."""
    rows = list(calls)
    operators = sorted({name for counts in rows for name in counts.operators})
    # Instead of counts: the code has no part in what these operators send.
    if operators:
        return [f"torch's {', '.join(operators)} does the work"]
    # Among ranks with equally many by bytes: which one reports first is chance.
    busiest = max(
        rows, key=lambda counts: (sum(counts.calls.values()), counts.n_bytes), default=None
    )
    if busiest is None or not busiest.calls or not busiest.passes:
        return []
    counts = ", ".join(f"{n / busiest.passes:g} x {kind}" for kind, n in busiest.calls.items())
    return [f"{counts} and {busiest.n_bytes / busiest.passes:.0f} bytes per rank and pass"]


def last_calls(notes: Path) -> list[str]:
    """Return the call of each rank that has not ended: "rank 1 waits in receive, line 3 of ..."."""
    lines = []
    for path in sorted(notes.glob("rank-*")):
        call = path.read_text()
        if call:
            lines.append(f"{path.name.replace('-', ' ')} waits in {call}")
    return lines


def _calling_line(*, through_labkit: bool) -> str:
    """Return the innermost line of a reader's code that is being executed, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        place = user_file(path)
        if place:
            return describe_line(place, frame.f_lineno)
        is_labkit = path.startswith(LABKIT) and path != __file__
        # What labkit's collectives call inside is theirs: they are recorded as a whole.
        if is_labkit and not through_labkit:
            return ""
        frame = frame.f_back
    return ""


def _size(value: Any) -> int:
    """Return the bytes of a tensor, or of the tensors in lists; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 0

"""The lines of the reader's code that a training step waits for.

Data set, forward, loss and optimizer: a thread looks at the stack of the training every
millisecond, as a sampling profiler does. The innermost line that is neither labkit's nor installed
gets the sample.

Backward runs no line of the reader's: each of its nodes is timed, and belongs to the line of the
forward pass that it differentiates.
"""

import math
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from labkit.machine.user_lines import user_file
from labkit.nn.training import FORWARD, OPTIMIZER
from labkit.studies.your_training.loop import INPUT, Loop
from labkit.torch_private import TorchDispatchMode

INTERVAL_S = 0.001
# Passes whose operators are timed: a single one may wait for memory or for other programs.
CLOCKED_PASSES = 3
SAMPLED_PARTS = (INPUT, FORWARD, OPTIMIZER)
# Share of a line's operators, by time, without a path to the loss. A line above it computes
# nothing that trains.
UNUSED_SHARE = 0.9
# Seconds of a thread by the part of a step, the line that runs, "train.py:31", and the line of the
# loss or data set through which labkit's loop came to it; "" without a line of the reader's.
Samples = defaultdict[tuple[str, str, str], float]
_autograd: Any = torch.autograd  # its sequence numbers are not in its types


def user_lines(frame: FrameType | None) -> list[str]:
    """List the reader's lines on a stack, the innermost first."""
    lines = []
    while frame is not None:
        name = user_file(frame.f_code.co_filename)
        if name:
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return lines or [""]


@contextmanager
def sampled_stacks(loop: Loop) -> Iterator[Samples]:
    """Look at the stack of the thread, which runs a loop, every `INTERVAL_S` during the block.

    Each time between two samples counts half to each: samples are rare while operators keep all
    cores busy, so their number would say too little.
    """
    samples: Samples = defaultdict(float)
    watched = threading.get_ident()
    is_over = threading.Event()

    def watch() -> None:
        _preempt()
        last = time.perf_counter()
        last_place = None
        while not is_over.wait(INTERVAL_S):
            lines = user_lines(sys._current_frames().get(watched))
            now = time.perf_counter()
            place = (loop.part, lines[0], lines[-1])
            # A late sample alone would take all the time of the line before.
            for one in (last_place or place, place):
                samples[one] += (now - last) / 2
            last = now
            last_place = place

    # A thread in Python code hands the interpreter over every 5 ms: too rarely for samples.
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(INTERVAL_S / 4)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(switch_s)


def _preempt() -> None:
    """Let this thread run as soon as it wakes, if the system can."""
    # Ranks run under SCHED_BATCH, whose threads wait for the next tick: while operators keep all
    # cores busy, samples would be late, and always after the same lines.
    if hasattr(os, "SCHED_OTHER"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass
class _ForwardCall:
    """An operator of the forward pass for which autograd has made a node."""

    innermost: str
    outermost: str
    seconds: float


class PassClock(TorchDispatchMode):
    """Finds the reader's line of each operator in forward passes; times backward passes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.backward_s: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        """Operators of the forward passes."""
        # By the number of the autograd node: its backward pass has the same.
        self._forward_calls: dict[int, _ForwardCall] = {}
        self._reached: set[int] = set()
        self._newest_node = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - start
        lines = user_lines(sys._getframe(1))
        self.calls[lines[0]] += 1
        # A node is numbered just before its operator runs.
        newest = _autograd._get_sequence_nr()
        if newest > self._newest_node:
            self._newest_node = newest
            self._forward_calls[newest - 1] = _ForwardCall(lines[0], lines[-1], seconds)
        return result

    def run_passes(self, loop: Loop) -> None:
        """Run a forward and a backward pass of a loop in its turn; time each node of the latter.

        A node's time ends when the next one begins. Operators alone would leave out what autograd
        does between them.
        """
        loop.take_batch()
        # Nodes that a data set has made are not of the pass.
        self._newest_node = _autograd._get_sequence_nr()
        with self:
            loss = loop.forward()
        current = ""
        start = 0.0

        def begin(line: str, _: Any) -> None:
            nonlocal current, start
            now = time.perf_counter()
            self.backward_s[current] += now - start
            current = line
            start = now

        for node in nodes_below(loss):
            number = node._sequence_nr()
            self._reached.add(number)
            call = self._forward_calls.get(number)
            # Without one it adds to a parameter's gradient, for the node before.
            if call is not None:
                node.register_prehook(partial(begin, call.innermost))
        start = time.perf_counter()
        loop.backward()
        begin("", None)
        loop.training.optimizer.zero_grad()

    def unused_lines(self) -> set[str]:
        """Return outermost lines of which hardly anything reaches the loss (`nodes_below`)."""
        total: defaultdict[str, float] = defaultdict(float)
        unused: defaultdict[str, float] = defaultdict(float)
        for number, call in self._forward_calls.items():
            total[call.outermost] += call.seconds
            if number not in self._reached:
                unused[call.outermost] += call.seconds
        return {line for line in unused if line and unused[line] > UNUSED_SHARE * total[line]}


def nodes_below(loss: Tensor) -> list[Any]:
    """Return the autograd nodes through which gradients of the loss will pass."""
    waiting: list[Any] = [loss.grad_fn]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        waiting += [edge for edge, _ in node.next_functions]
    return list(seen)


def line_rows(loop: Loop, n_steps: int) -> Iterator[dict[str, Any]]:
    """Run some steps of a loop in its turn; yield a row per line of the reader's.

    `input_share`, `forward_share` and `optimizer_share`: of the part's time at which the line runs,
    without what other lines of the reader's do for it. `backward_share`: of the backward pass, by
    its nodes. `calls`: operators per step. `unused_share`: of the forward pass, by a line of
    the loss with all that it calls, if nothing of it reaches the loss.

    Shares of parts, and not seconds: looking at a training slows it down, and some parts more.
    """
    with sampled_stacks(loop) as samples:
        for _ in range(n_steps):
            loop.step()
    clock = PassClock()
    for _ in range(CLOCKED_PASSES):
        clock.run_passes(loop)
    part_s: defaultdict[str, float] = defaultdict(float)
    line_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    outermost_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    for (part, innermost, outermost), seconds in samples.items():
        part_s[part] += seconds
        line_s[part, innermost] += seconds
        outermost_s[part, outermost] += seconds
    backward_s = sum(clock.backward_s.values())
    unused = clock.unused_lines()
    sampled = {innermost for _, innermost, _ in samples}
    for line in {*sampled, *clock.backward_s, *unused} - {""}:
        row: dict[str, Any] = {"line": line, "calls": math.ceil(clock.calls[line] / CLOCKED_PASSES)}
        # Without a sample of a part, none is its line's.
        for part in SAMPLED_PARTS:
            row[f"{part}_share"] = line_s[part, line] / (part_s[part] or 1.0)
        row["backward_share"] = clock.backward_s[line] / (backward_s or 1.0)
        row["unused_share"] = 0.0
        if line in unused:
            row["unused_share"] = outermost_s[FORWARD, line] / (part_s[FORWARD] or 1.0)
        yield row

"""Rates of one machine, measured by the lab `limits`, and times that follow from them.

Every prediction of every lab uses these numbers and no others. An operator takes as long as a
square matmul of its FLOPs, or as an addition that moves its bytes, whichever takes longer, by
measured curves that include the call itself. An algorithm of messages takes messages * alpha +
bytes * beta of its transport, between measured numbers of ranks.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

import numpy as np

from labkit.costs.communication import AT_ONCE, MessageCost

# Pairs (FLOPs or bytes, seconds), from small to large.
Curve = tuple[tuple[float, float], ...]
ALL_REDUCE = "all-reduce"
MESSAGE = "a message"
BURST = "messages at once"
# Calibrations in older runs have rates of several ranks, and errors of transports.
OLDER_RUNS = {"extra": "ignore"}
# The transport between GPUs; the others move what lies in the CPU's memory.
NCCL = "NCCL"
# Timed to separate a message from its call: successive messages, and an all-reduce of them.
ROW = "messages in a row"
IN_A_ROW = 4
DOUBLING = "recursive doubling"


@dataclass(frozen=True, kw_only=True)
class Autograd:
    """Cost of a forward and backward pass on top of its operators, in a process with other work."""

    begin_s: float
    """Both passes together, once."""
    operator_s: float
    """Time of an operator with next to nothing to do, with the Python that calls it."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Times of one rank that has `device`, "cpu" or "cuda", to itself."""

    __pydantic_config__: ClassVar[dict[str, str]] = OLDER_RUNS
    device: str
    products: dict[str, Curve]
    """By dtype: FLOPs and seconds of square matmuls."""
    additions: Curve
    """Bytes and seconds of an addition whose result is a new tensor."""
    autograd: Autograd | None = None
    """None on a GPU, and in older runs."""

    def operator_s(self, flops: float, n_bytes: float, dtype: str = "float32") -> float:
        """Return seconds of one operator with its call.

        NaN for a matmul in a dtype that was not measured.
        """
        moving_s = _interpolate(self.additions, n_bytes)
        if not flops:
            return moving_s
        if dtype not in self.products:
            return float("nan")
        # The roofline: a matmul of few FLOPs per byte is bound by its bytes.
        return max(_interpolate(self.products[dtype], flops), moving_s)

    def autograd_s(self, operators: float, *, begin: bool = True) -> float:
        """Seconds that autograd adds to `operator_s` of so many operators; 0 if unknown.

        `begin`: include the start of both passes.
        """
        if self.autograd is None:
            return 0.0
        # The smallest addition is a call alone, which `operator_s` has already counted.
        call_s = min(seconds for _, seconds in self.additions)
        extra_s = operators * max(0.0, self.autograd.operator_s - call_s)
        if begin:
            extra_s += self.autograd.begin_s
        return extra_s


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Costs of a transport between a number of ranks: call + messages alpha + bytes beta.

    `what` is `ALL_REDUCE`, `MESSAGE` (each rank sends to its right-hand neighbor), or `BURST` (each
    sends to all others at once, which counts as one message of all their bytes).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = OLDER_RUNS
    way: str
    """ "gloo", "shared memory", or `NCCL`."""
    what: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    call_s: float = 0.0
    """Before the first of any number of messages."""

    def predict_s(self, cost: MessageCost) -> float:
        return self.call_s + cost.messages * self.alpha_s + cost.n_bytes * self.beta_s_per_byte


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The numbers of one machine; `run` is the limits run that they are from."""

    __pydantic_config__: ClassVar[dict[str, str]] = OLDER_RUNS
    run: str
    measured: datetime
    machine: str
    rates: tuple[Rates, ...]
    transports: tuple[Transport, ...] = ()
    source: str = ""
    """The labkit that measured it; empty in older runs."""
    is_disturbed: bool = False
    """Whether the machine was busy meanwhile, and no other calibration is as new."""

    def rates_on(self, device: str) -> Rates | None:
        """Return the rates of a device; None if it was not measured."""
        return next((one for one in self.rates if one.device == device), None)

    def transport(self, way: str, what: str, ranks: int) -> Transport | None:
        """Return costs of a transport between this number of ranks; None if not measured."""
        for one in self.transports:
            if (one.way, one.what, one.ranks) == (way, what, ranks):
                return one
        return None

    def algorithm_s(self, way: str, algorithm: str, cost: MessageCost, ranks: int) -> float | None:
        """Seconds of an algorithm with this cost; None over a transport that was not measured."""
        # Messages to all others at once share the rank's cores and links: another rate.
        what = BURST if algorithm in AT_ONCE else MESSAGE
        transport = self.transport(way, what, ranks)
        if transport is None:
            return None
        return transport.predict_s(cost)

    def messages_s(self, calls: float, n_bytes: float, ranks: int) -> float | None:
        """Return seconds of some collectives, a message each, between CPU ranks.

        None if no transport was measured.
        """
        # labkit's collectives take shared memory where there is some.
        transport = self.transport("shared memory", MESSAGE, ranks)
        if transport is None:
            transport = self.transport("gloo", MESSAGE, ranks)
        if transport is None:
            return None
        return calls * transport.predict_s(MessageCost(1, 0)) + n_bytes * transport.beta_s_per_byte


def _interpolate(curve: Curve, work: float) -> float:
    """Interpolate between points in logarithms.

    Beyond the last point at its rate; below the first, its time.
    """
    sizes, times = zip(*curve, strict=True)
    if work >= sizes[-1]:
        return float(times[-1] * work / sizes[-1])
    return float(np.exp(np.interp(np.log(max(work, sizes[0])), np.log(sizes), np.log(times))))

"""What one machine can do, measured once by the lab `limits`, and what work should therefore take on it.

Every prediction of every lab uses these numbers and no others. An operator takes

    max(what a square matmul of its FLOPs takes, what an addition that moves its bytes takes)

read off measured curves, which include the call itself; an algorithm of messages takes messages * alpha + bytes * beta
of its transport. With several ranks at work, the curves are those measured while as many computed at once; beyond the
number measured, times grow in proportion to the ranks.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

import numpy as np

from labkit.costs.communication import AT_ONCE, AlphaBeta, MessageCost

Curve = tuple[tuple[float, float], ...]
"""Pairs (FLOPs or bytes, seconds), from small to large."""
FULL, CPU = "float32", "cpu"
ALL_REDUCE, MESSAGE, BURST = "all-reduce", "a message", "messages at once"
NCCL = "NCCL"
"""The transport between GPUs; the others move what lies in the CPU's memory."""
ROW, IN_A_ROW, DOUBLING = "messages in a row", 4, "recursive doubling"
"""Timed, too, to tell a message from its call: so many successive messages, and an all-reduce made of messages."""


class Operator(Protocol):
    """A call as `bench.operators` records it: `flops` of a matmul, else 0; bytes that it reads and writes."""

    @property
    def flops(self) -> float: ...
    @property
    def n_bytes(self) -> float: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Autograd:
    """The cost of a forward and backward pass on top of its operators, when something else ran before it."""

    begin_s: float
    """Both passes together, once."""
    operator_s: float
    """Each operator with next to nothing to do, forward or backward, with the Python that calls it."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Times of one rank on `device`, "cpu" or "cuda", while `ranks` compute at once."""

    device: str
    ranks: int
    products: dict[str, Curve]
    """By dtype: FLOPs and seconds of square matmuls."""
    additions: Curve
    """Bytes moved and seconds of an addition whose result is a new tensor, as an operator of a model makes it."""
    copies: Curve
    """The same for a copy into an existing tensor."""
    autograd: Autograd | None = None
    """None on a GPU, and in older runs."""

    def operator_s(self, flops: float, n_bytes: float, dtype: str = FULL) -> float:
        """Seconds of one operator with its call; NaN for a matmul in a dtype that was not measured."""
        moving = _seconds(self.additions, n_bytes)
        return float(np.maximum(self.product_s(flops, dtype), moving)) if flops else moving

    def product_s(self, flops: float, dtype: str = FULL) -> float:
        """Seconds of a matmul of so many FLOPs; NaN in a dtype that was not measured."""
        return _seconds(self.products[dtype], flops) if dtype in self.products else float("nan")

    def under_autograd_s(self, operators: float, *, begin: bool = True) -> float:
        """Seconds that autograd adds to `operator_s` of so many operators; 0 if unknown.

        `begin`: include the start of both passes.
        """
        if self.autograd is None:
            return 0.0
        extra_s = operators * max(0.0, self.autograd.operator_s - self.call_s)
        return extra_s + self.autograd.begin_s if begin else extra_s

    def flops_per_s(self, dtype: str = FULL) -> float:
        """Rate of the fastest matmul; NaN for a dtype that was not measured."""
        return max((flops / seconds for flops, seconds in self.products.get(dtype, ())), default=float("nan"))

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate of the longest copy, bytes read and written: from memory, past all caches."""
        n_bytes, seconds = self.copies[-1]
        return n_bytes / seconds

    @property
    def call_s(self) -> float:
        """Seconds of an operator with next to nothing to do."""
        return min(seconds for _, seconds in self.additions)

    def slowed(self, ranks: int) -> "Rates":
        """The rates of more ranks: all times grow as their number."""
        factor = ranks / self.ranks
        if factor == 1:
            return self
        autograd = self.autograd and Autograd(
            begin_s=factor * self.autograd.begin_s, operator_s=factor * self.autograd.operator_s
        )
        return replace(
            self,
            ranks=ranks,
            products={dtype: _scaled(curve, factor) for dtype, curve in self.products.items()},
            additions=_scaled(self.additions, factor),
            copies=_scaled(self.copies, factor),
            autograd=autograd,
        )


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Costs of a transport between a number of ranks: call + messages alpha + bytes beta.

    `what` is `ALL_REDUCE` (one of the whole tensor), `MESSAGE` (each rank sends to its right-hand neighbor), or `BURST`
    (each sends to every other at once, which counts as one message of all their bytes).
    """

    way: str
    """ "gloo", "shared memory", or `NCCL`."""
    what: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    call_s: float = 0.0
    """Before the first of any number of messages."""
    error: float | None = None
    """Median relative error of the fit."""

    def predict_s(self, cost: MessageCost) -> float:
        return self.call_s + AlphaBeta(self.alpha_s, self.beta_s_per_byte).predict_s(cost)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The numbers of one machine; `run` is the limits run that they are from."""

    run: str
    measured: datetime
    machine: str
    cores: int
    threads: int
    """Of one rank that has the machine to itself."""
    rates: tuple[Rates, ...]
    """By device, and ranks at work."""
    transports: tuple[Transport, ...] = ()
    source: str = ""
    """Of the labkit that measured it; empty in older runs."""
    is_disturbed: bool = False
    """Whether the machine was busy meanwhile, and no other calibration is as new."""

    def of_ranks(self, ranks: int = 1, device: str = CPU) -> Rates:
        """Times of each of so many ranks that compute at once. ValueError for a device that was not measured.

        Beyond the number measured, ranks share the threads of a CPU, and take turns on a GPU.
        """
        measured = sorted((r for r in self.rates if r.device == device and r.ranks <= ranks), key=lambda r: r.ranks)
        if not measured:
            raise ValueError(f"expected a device that was calibrated, got {device!r}")
        nearest = measured[-1]
        if nearest.autograd is None:  # depends on calls, and is measured with few ranks
            autograd = next((one.autograd for one in reversed(measured) if one.autograd), None)
            nearest = replace(nearest, autograd=autograd)
        return nearest.slowed(ranks)

    def knows(self, device: str) -> bool:
        return any(one.device == device for one in self.rates)

    def transport(self, way: str, what: str, ranks: int) -> Transport | None:
        """Costs of a transport between so many ranks; None if it was not measured.

        Beyond the number measured, all costs grow as ranks per core do. What sends to or through every other rank (a
        burst, gloo's all-reduce) has more messages in proportion.
        """
        measured = sorted((t for t in self.transports if (t.way, t.what) == (way, what)), key=lambda t: t.ranks)
        nearest = next((one for one in reversed(measured) if one.ranks <= ranks), measured[0] if measured else None)
        if nearest is None or nearest.ranks == ranks:
            return nearest
        slower = max(ranks, self.cores) / max(nearest.ranks, self.cores)
        messages = 1.0 if what == MESSAGE else (ranks - 1) / (nearest.ranks - 1)
        n_bytes = (ranks - 1) * nearest.ranks / (ranks * (nearest.ranks - 1)) if what == ALL_REDUCE else 1.0
        return replace(
            nearest,
            ranks=ranks,
            alpha_s=slower * messages * nearest.alpha_s,
            beta_s_per_byte=slower * n_bytes * nearest.beta_s_per_byte,
            call_s=slower * nearest.call_s,
        )

    def algorithm_s(self, way: str, algorithm: str, cost: MessageCost, ranks: int) -> float | None:
        """Seconds of an algorithm that costs so many messages; None over a transport that was not measured."""
        transport = self.transport(way, BURST if algorithm in AT_ONCE else MESSAGE, ranks)
        return transport.predict_s(cost) if transport else None

    def operators_s(self, operators: Iterable[Operator], ranks: int = 1, device: str = CPU) -> float:
        """Seconds of successive operators on each of so many ranks; NaN if one has no rate."""
        rates = self.of_ranks(ranks, device)
        counts = Counter((one.flops, one.n_bytes, one.dtype) for one in operators)  # layers repeat
        return sum(count * rates.operator_s(*one) for one, count in counts.items())


def _scaled(curve: Curve, factor: float) -> Curve:
    return tuple((work, factor * seconds) for work, seconds in curve)


def _seconds(curve: Curve, work: float) -> float:
    """Interpolate between two points in logarithms; beyond the last one at its rate, below the first its time."""
    sizes, times = zip(*curve, strict=True)
    if work >= sizes[-1]:
        return float(times[-1] * work / sizes[-1])
    return float(np.exp(np.interp(np.log(max(work, sizes[0])), np.log(sizes), np.log(times))))

"""What one machine can do, measured once by the lab `limits`, and what work should therefore take on it.

Every prediction of every lab is made of these numbers and no others. An operator takes

    max(what a square product of its FLOPs takes, what an addition that moves its bytes takes)

read off measured curves, which include what the call itself costs; an algorithm of messages takes
messages * alpha + bytes * beta of its transport. With several ranks at work the curves are those measured while as many
ranks computed at once, or, of more ranks than were measured, those times ranks over ranks measured.
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
"""The way between GPUs; the others move what lies in the CPU's memory."""
ROW, IN_A_ROW, DOUBLING = "messages in a row", 4, "recursive doubling"
"""Timed, too, to tell a message from its call: so many that follow one another, and an all-reduce made of them."""


class Operator(Protocol):
    """A call as `bench.operators` records it: `flops` of a matrix product, else 0; bytes that it reads and writes."""

    @property
    def flops(self) -> float: ...
    @property
    def n_bytes(self) -> float: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Autograd:
    """What a forward and backward pass costs beside its work, where something else ran before it."""

    begin_s: float
    """Of both passes together, once."""
    operator_s: float
    """Of each operator that has next to nothing to do, forward or backward, the Python that calls it included."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one rank takes on `device`, "cpu" or "cuda", while `ranks` compute at once."""

    device: str
    ranks: int
    products: dict[str, Curve]
    """By dtype: FLOPs and seconds of square matrix products."""
    additions: Curve
    """Bytes moved and seconds of an addition whose result is a new tensor, as an operator of a model makes it."""
    copies: Curve
    """The same of a copy into a tensor that is there."""
    autograd: Autograd | None = None
    """None on a GPU, and in older runs."""

    def operator_s(self, flops: float, n_bytes: float, dtype: str = FULL) -> float:
        """Seconds of one operator, its call included; NaN for a product in a dtype that was not measured."""
        moving = _seconds(self.additions, n_bytes)
        return float(np.maximum(self.product_s(flops, dtype), moving)) if flops else moving

    def product_s(self, flops: float, dtype: str = FULL) -> float:
        """Seconds of a matrix product of so many FLOPs; NaN in a dtype that was not measured."""
        return _seconds(self.products[dtype], flops) if dtype in self.products else float("nan")

    def under_autograd_s(self, operators: float, *, begin: bool = True) -> float:
        """What so many operators of a forward and backward pass take beside `operator_s` of each; 0 if unknown.

        `begin`: with what both passes take to begin.
        """
        if self.autograd is None:
            return 0.0
        more_s = operators * max(0.0, self.autograd.operator_s - self.call_s)
        return more_s + self.autograd.begin_s if begin else more_s

    def copy_s(self, n_bytes: float) -> float:
        return _seconds(self.copies, n_bytes)

    def flops_per_s(self, dtype: str = FULL) -> float:
        """Of the fastest product; NaN for a dtype that was not measured."""
        return max((flops / seconds for flops, seconds in self.products.get(dtype, ())), default=float("nan"))

    @property
    def memory_bytes_per_s(self) -> float:
        """Of the longest copy, read and written bytes together: from memory, past all caches."""
        n_bytes, seconds = self.copies[-1]
        return n_bytes / seconds

    @property
    def call_s(self) -> float:
        """Of an operator that has next to nothing to do."""
        return min(seconds for _, seconds in self.additions)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What one way in which ranks reach each other costs, by how many they are: call + messages alpha + bytes beta.

    `what` is `ALL_REDUCE` (one of the whole tensor), `MESSAGE` (all send their right-hand neighbor one, and receive
    one), or `BURST` (all send every other one at once, which counts as one message of all their bytes).
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
    """Of the fit, relative, in the median."""

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
    """Whether the machine was slow or busy meanwhile, and no other calibration is as new."""

    def of_ranks(self, ranks: int = 1, device: str = CPU) -> Rates:
        """What each of so many ranks takes while all compute; beyond those measured, in proportion to their number.

        For ranks share the threads of a CPU from the second one on, and take turns on a GPU. ValueError for a device
        that was not measured.
        """
        known = sorted((r for r in self.rates if r.device == device and r.ranks <= ranks), key=lambda r: r.ranks)
        if not known:
            raise ValueError(f"expected a device that was calibrated, got {device!r}")
        nearest = known[-1]
        if nearest.autograd is None:  # is a matter of calls, and measured of few ranks
            nearest = replace(nearest, autograd=next((one.autograd for one in reversed(known) if one.autograd), None))
        return _slowed(nearest, ranks, ranks / nearest.ranks)

    def knows(self, device: str) -> bool:
        return any(one.device == device for one in self.rates)

    def transport(self, way: str, what: str, ranks: int) -> Transport | None:
        """Costs of a way for so many ranks; None if it was not measured.

        Of more than were measured, all grow as ranks per core do, and what sends to every other rank, or through every
        other one as gloo's all-reduce does, has as many more messages as there are more ranks.
        """
        known = sorted((one for one in self.transports if (one.way, one.what) == (way, what)), key=lambda t: t.ranks)
        nearest = next((one for one in reversed(known) if one.ranks <= ranks), known[0] if known else None)
        if nearest is None or nearest.ranks == ranks:
            return nearest
        slower = max(ranks, self.cores) / max(nearest.ranks, self.cores)
        more = 1.0 if what == MESSAGE else (ranks - 1) / (nearest.ranks - 1)
        bytes_per_rank = ranks * (nearest.ranks - 1) / ((ranks - 1) * nearest.ranks) if what == ALL_REDUCE else 1.0
        return replace(
            nearest,
            ranks=ranks,
            alpha_s=slower * more * nearest.alpha_s,
            beta_s_per_byte=slower / bytes_per_rank * nearest.beta_s_per_byte,
            call_s=slower * nearest.call_s,
        )

    def algorithm_s(self, way: str, algorithm: str, cost: MessageCost, ranks: int) -> float | None:
        """Seconds of an algorithm that costs so many messages; None over what was not measured."""
        found = self.transport(way, BURST if algorithm in AT_ONCE else MESSAGE, ranks)
        return found.predict_s(cost) if found else None

    def operators_s(self, operators: Iterable[Operator], ranks: int = 1, device: str = CPU) -> float:
        """Seconds of operators that follow one another on each of so many ranks; NaN if one has no rate."""
        rates = self.of_ranks(ranks, device)
        alike = Counter((one.flops, one.n_bytes, one.dtype) for one in operators)  # layers are
        return sum(times * rates.operator_s(*one) for one, times in alike.items())


def _any() -> Calibration:
    """Of a machine that does a FLOP, a byte and a message per second in all dtypes on all devices."""
    line: Curve = ((1.0, 1.0), (2.0, 2.0))
    products = dict.fromkeys((FULL, "bfloat16", "float16", "float64"), line)
    rates = tuple(
        Rates(device=device, ranks=1, products=products, additions=line, copies=line) for device in (CPU, "cuda")
    )
    transports = tuple(
        Transport(way=way, what=what, ranks=2, alpha_s=1.0, beta_s_per_byte=1.0)
        for way in ("gloo", "shared memory")
        for what in (ALL_REDUCE, MESSAGE, BURST)
    )
    return Calibration(
        run="any", measured=datetime.min, machine="any", cores=1, threads=1, rates=rates, transports=transports
    )


def _slowed(rates: Rates, ranks: int, factor: float) -> Rates:
    if factor == 1:
        return rates

    def longer(curve: Curve) -> Curve:
        return tuple((work, factor * seconds) for work, seconds in curve)

    products = {dtype: longer(curve) for dtype, curve in rates.products.items()}
    known = rates.autograd
    autograd = known and Autograd(begin_s=factor * known.begin_s, operator_s=factor * known.operator_s)
    additions, copies = longer(rates.additions), longer(rates.copies)
    return replace(rates, ranks=ranks, products=products, additions=additions, copies=copies, autograd=autograd)


def _seconds(curve: Curve, work: float) -> float:
    """Between two points on the line through them, both axes logarithmic; beyond the last one at its rate.

    Below the first one the call is all there is: its time.
    """
    sizes, times = zip(*curve, strict=True)
    if work >= sizes[-1]:
        return float(times[-1] * work / sizes[-1])
    return float(np.exp(np.interp(np.log(max(work, sizes[0])), np.log(sizes), np.log(times))))


ANY = _any()
"""What could be predicted at all, of any machine: to tell what lacks a calibration from what lacks rows."""

"""Costs of messages on one machine, measured once by the lab `limits`.

Every prediction of every lab uses these numbers and no others. An algorithm takes messages * alpha + bytes * beta of
its transport; beyond the measured number of ranks, costs grow in proportion to the ranks.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from labkit.costs.communication import AT_ONCE, MessageCost

ALL_REDUCE, MESSAGE, BURST = "all-reduce", "a message", "messages at once"
OLDER_RUNS = {"extra": "ignore"}  # have rates of operators, too
NCCL = "NCCL"
"""The transport between GPUs; the others move what lies in the CPU's memory."""
ROW, IN_A_ROW, DOUBLING = "messages in a row", 4, "recursive doubling"
"""Also timed, to separate a message from its call: successive messages, and an all-reduce made of messages."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Costs of a transport between a number of ranks: call + messages alpha + bytes beta.

    `what` is `ALL_REDUCE` (one of the whole tensor), `MESSAGE` (each rank sends to its right-hand neighbor), or `BURST`
    (each sends to every other at once, which counts as one message of all their bytes).
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
    cores: int
    transports: tuple[Transport, ...] = ()
    source: str = ""
    """The labkit that measured it; empty in older runs."""
    is_disturbed: bool = False
    """Whether the machine was busy meanwhile, and no other calibration is as new."""

    def transport(self, way: str, what: str, ranks: int) -> Transport | None:
        """Costs of a transport between this number of ranks; None if it was not measured.

        Beyond the measured number, all costs grow as ranks per core do. What sends to or through every other rank (a
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
        """Seconds of an algorithm with this cost; None over a transport that was not measured."""
        transport = self.transport(way, BURST if algorithm in AT_ONCE else MESSAGE, ranks)
        return transport.predict_s(cost) if transport else None

    def messages_s(self, calls: float, n_bytes: float, ranks: int) -> float | None:
        """Seconds of so many collectives, a message each, between CPU ranks; None if no transport was measured."""
        transport = self.transport("shared memory", MESSAGE, ranks) or self.transport("gloo", MESSAGE, ranks)
        if transport is None:
            return None
        return calls * (transport.call_s + transport.alpha_s) + n_bytes * transport.beta_s_per_byte

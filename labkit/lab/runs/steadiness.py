"""How steady a machine was while a run was measured: by its heartbeats, and by what others took of its cores.

Heartbeats are compared with one another where as many ranks computed with as many threads, and every rank had cores
of its own: ranks that share a core disturb one another, which is no news of the machine.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from labkit.machine.load import Load, is_busy

FREAK = 1.5
"""Times the usual heartbeat of a run: the rounds before and after such a beat were taken in a freak moment."""
SLOW = 1.2
"""Times the best point of a run: from here on a point counts as slower. Quiet machines stay below."""

FEWEST_BEATS = 3
"""Of each rank: with fewer, one freak moment would pass for a slow point."""

Group = tuple[int, int]
"""Ranks, and threads of each."""


@dataclass(frozen=True)
class Steadiness:
    """What the end records of a run say of the machine; empty for runs that noted nothing."""

    pulse_s: Mapping[str, float]
    """By point with enough beats: its median heartbeat, of the slowest rank."""
    groups: Mapping[str, Group]
    """By point with beats."""
    busy: Mapping[str, Load]
    """Points during which others took cores, or measured."""
    freak: Mapping[str, frozenset[tuple[int, int]]]
    """By point: (call of the clock, round) of samples that were taken in a freak moment."""

    @property
    def slowdown(self) -> dict[str, float]:
        """By point: its heartbeat over that of the fastest point that is comparable with it."""
        best = best_by_group(self)
        return {point: pulse / best[self.groups[point]] for point, pulse in self.pulse_s.items()}

    @property
    def slow(self) -> dict[str, float]:
        """Points that were measured while the machine was slower, and how many times."""
        return {point: factor for point, factor in self.slowdown.items() if factor >= SLOW}

    @property
    def flagged(self) -> set[str]:
        """Points whose times may be too long."""
        return {*self.slow, *self.busy}


def best_by_group(steadiness: Steadiness) -> dict[Group, float]:
    """The fastest heartbeat of any point, by ranks and threads."""
    found: dict[Group, float] = {}
    for point, pulse in steadiness.pulse_s.items():
        group = steadiness.groups[point]
        found[group] = min(pulse, found.get(group, pulse))
    return found


def steadiness_of(ends: Mapping[str, Mapping[str, Any]], cores: int) -> Steadiness:
    """From the end records of a run by point; `cores` of the machine."""
    beats = {point: by_rank for point, end in ends.items() if (by_rank := _comparable_beats(end, cores))}
    groups = {point: _group(ends[point]) for point in beats}
    # of several ranks the slowest counts, as in what they measure together
    pulse = {
        point: max(median_low(s for *_, s in of_rank) for of_rank in by_rank)
        for point, by_rank in beats.items()
        if min(map(len, by_rank)) >= FEWEST_BEATS
    }
    usual = {
        group: median(s for point in beats if groups[point] == group for of_rank in beats[point] for *_, s in of_rank)
        for group in set(groups.values())
    }
    freak = {point: _freak_rounds(by_rank, FREAK * usual[groups[point]]) for point, by_rank in beats.items()}
    loads = {point: Load.model_validate(end["load"]) for point, end in ends.items() if end.get("load")}
    busy = {point: load for point, load in loads.items() if load.other_measurements or is_busy(load, cores)}
    return Steadiness(pulse, groups, busy, freak)


def _comparable_beats(end: Mapping[str, Any], cores: int) -> list[list[tuple[int, int, float]]]:
    """By rank; none where ranks share cores."""
    by_rank = [of_rank for of_rank in end.get("beats", ()) if of_rank]
    ranks, threads = _group(end) if by_rank else (0, 0)
    return by_rank if ranks * threads <= cores else []


def _group(end: Mapping[str, Any]) -> Group:
    facts = end.get("facts", {})
    return int(facts.get("world_size", 1)), int(facts.get("threads", 1))


def _freak_rounds(by_rank: Iterable[Iterable[tuple[int, int, float]]], limit_s: float) -> frozenset[tuple[int, int]]:
    return frozenset(
        (call, near)
        for of_rank in by_rank
        for call, number, seconds in of_rank
        if call and seconds >= limit_s
        for near in (number - 1, number)
        if near >= 0
    )

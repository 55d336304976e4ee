"""How steady the machine was, in words: on a page where it matters, and in numbers that the index compares."""

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.lab.columns import label
from labkit.lab.runs.steadiness import Group, best_by_group
from labkit.lab.runs.store import Run
from labkit.lab.units import counted

MOST_NAMED = 3
HOW_MEASURED = {"timeout_s", "warmup", "repeats", "scheduling"}
"""Of a point, what says nothing of what was measured."""
ALIKE = 1.1
"""Times the fastest lab of a report: up to here the machine was equally fast for all."""


def steadiness_notes(run: Run) -> list[str]:
    """What a reader of the run should know of the machine meanwhile, a sentence each; empty where it was steady."""
    steady, planned = run.steadiness, len(run.header.planned)
    notes = []
    if steady.slow:
        of_points = f"{len(steady.slow)} of {counted(planned, 'point')}{_named(run, steady.slow)}"
        notes.append(
            f"The machine was up to {max(steady.slow.values()):.1f} times slower during {of_points}: "
            "their times are too long, ratios within a point hold."
        )
    if others := [load for load in steady.busy.values() if load.other_measurements]:
        notes.append(f"During {counted(len(others), 'point')} another labkit measurement ran on this machine.")
    elif steady.busy:
        taken = max((load.busy_cores or 0.0) + (load.stolen_cores or 0.0) for load in steady.busy.values())
        kept = f"Other programs took up to {taken:.1f} of {run.header.machine.cores} cores"
        notes.append(f"{kept} during {counted(len(steady.busy), 'point')}{_named(run, steady.busy)}.")
    return notes


def steadiness_row(run: Run) -> str | None:
    """One line of facts for the provenance card; None for a run without heartbeats."""
    slowdown = run.steadiness.slowdown
    if not slowdown:
        return None
    worst = max(slowdown.values())
    freak = sum(map(len, run.steadiness.freak.values()))
    moments = f"{counted(freak, 'round')} taken in a freak moment" if freak else "no round taken in a freak moment"
    return f"the slowest point's heartbeat took {worst:.2f} times the fastest's; {moments}"


def pulse_record(run: Run) -> list[dict[str, Any]]:
    """What the index compares of a run: by ranks and threads, the heartbeat of its best point and the slowdown beside.

    A dictionary a group, `slowdown` being the median over the points of the group.
    """
    steady, found = run.steadiness, []
    for (ranks, threads), best in sorted(best_by_group(steady).items()):
        pulses = sorted(pulse for point, pulse in steady.pulse_s.items() if steady.groups[point] == (ranks, threads))
        found.append({"ranks": ranks, "threads": threads, "best_s": best, "median_s": pulses[len(pulses) // 2]})
    return found


def slowdown_by_lab(pulses: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, float]:
    """By lab, how many times slower the machine was during it than at its best in any lab; from `pulse_record`s."""
    best = best_of_labs(pulses)
    return {
        lab: max(record["median_s"] / best[record["ranks"], record["threads"]] for record in records)
        for lab, of_lab in pulses.items()
        if (records := list(of_lab))
    }


def best_of_labs(pulses: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[Group, float]:
    """The fastest heartbeat of any lab by ranks and threads, from `pulse_record`s."""
    best: dict[Group, float] = {}
    for records in pulses.values():
        for record in records:
            group = record["ranks"], record["threads"]
            best[group] = min(record["best_s"], best.get(group, record["best_s"]))
    return best


def steadiness_sentence(slowdown: Mapping[str, float]) -> str | None:
    """What the index says of the machine during its labs, by their titles; None if no page has heartbeats."""
    if not slowdown:
        return None
    slow = {lab: factor for lab, factor in slowdown.items() if factor >= ALIKE}
    if not slow:
        worst = max(slowdown.values())
        return f"The machine was steady: no lab found it more than {100 * (worst - 1):.0f} % slower than at its best."
    named = ", ".join(f"{factor:.1f} times during {lab}" for lab, factor in sorted(slow.items(), key=lambda x: -x[1]))
    return f"The machine was not equally fast all along. Time of a typical point beside its best: {named}."


def _named(run: Run, points: Iterable[str]) -> str:
    """ " (2 ranks, exchange; threads)": points by what tells them apart from others of the run, if anything does."""
    planned = {
        point: {name: value for name, value in fields.items() if isinstance(value, str | int | float)}
        for point, fields in run.header.planned.items()
    }
    values: dict[str, set[Any]] = {}
    for fields in planned.values():
        for name, value in fields.items():
            values.setdefault(name, set()).add(value)
    varying = [name for name, different in values.items() if len(different) > 1 and name not in HOW_MEASURED]
    told = [
        ", ".join(label(name, planned[point][name]) for name in varying if planned[point].get(name)) for point in points
    ]
    distinct = [text for text in dict.fromkeys(told) if text]
    more = f"; and {len(distinct) - MOST_NAMED} more" if len(distinct) > MOST_NAMED else ""
    return f" ({'; '.join(distinct[:MOST_NAMED])}{more})" if distinct else ""

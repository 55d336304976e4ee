"""Where the numbers of a page come from: the run, how to measure it again, how its ranks ran."""

import json
import shlex

from labkit.bench.intervals import FALSE_DISCOVERY_RATE
from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.lab.calibration import LIMITS, describe_calibration
from labkit.lab.config import AUTO, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.project import relative_to_project
from labkit.lab.runs.records import Resumption, RunHeader
from labkit.lab.runs.store import Run
from labkit.lab.units import counted
from labkit.parallel.ranks.torchrun import describe_hosts

RULE = (
    f"A difference counts if it is at least {100 * MIN_RELEVANT_DIFFERENCE:.0f}% and significant"
    f" (false discovery rate {FALSE_DISCOVERY_RATE:.1%} per question). Intervals are 95% and cover"
    " what varied within this run. A ratio is estimated from rounds, so it may differ from the"
    " ratio of two medians. Compare ratios, not times, between sections: other processes measured"
    " them at other times."
)


def provenance_rows(lab: Lab, run: Run) -> dict[str, str]:
    """Return facts of the provenance card by name."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Subject": lab.example(run.results()),
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        "Resumed at": "; ".join(map(_describe_resumption, run.resumptions)),
        "Draw again": f"labkit report {lab.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(lab, run.header),
        "Ranks": _describe_ranks(run),
    }
    if lab.name != LIMITS:
        rows["Predicted from"] = describe_calibration(run)
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    # Most runs have no example and no resumption.
    return {name: value for name, value in rows.items() if value}


def _describe_resumption(resumption: Resumption) -> str:
    """Say when, at which commit and by which command a run was resumed; older runs lack some."""
    when = f"{resumption.at:%F %T} UTC" if resumption.at else "unknown time"
    return (
        f"{when}, {resumption.source or 'unknown commit'}, by"
        f" {resumption.command or 'an unknown command'}"
    )


def _command_again(lab: Lab, header: RunHeader) -> str:
    """Return the command, with --set for what differs from the profile, that measures it again."""
    # A config may name alternatives of a notebook, or be of another version of the lab.
    try:
        lab.configure(header.profile, header.config, header.machine)
    except ParameterError:
        return "by the notebook with the alternatives that it adds, or the labkit that measured it"
    profiles = lab.profiles_on(header.machine, header.config.get("device") or AUTO)
    profile = profiles[header.profile].model_dump(mode="json")
    # Without the run's time: on another machine it would leave out other points, or none.
    changed = {
        name: value
        for name, value in header.config.items()
        if name != "budget_s" and profile[name] != value
    }
    options = [
        f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()
    ]
    return f"labkit report {lab.name} --profile {header.profile}" + "".join(options)


def _describe_ranks(run: Run) -> str:
    """Say how the ranks ran: "2 ranks: gloo, forkserver, scheduling batch, 1 thread each"."""
    described = set()
    for fact in run.facts().values():
        # Ranks that failed to start have reported only some of these.
        if {"world_size", "backend", "start_method", "scheduling", "threads"} <= fact.keys():
            parts = [
                fact["backend"] or "no process group",
                fact["start_method"],
                f"scheduling {fact['scheduling']}",
                f"{counted(fact['threads'], 'thread')} each",
            ]
            if "shared_memory" in fact:
                parts.append(f"shared memory {fact['shared_memory']}")
            described.add((fact["world_size"], ", ".join(parts)))
    texts = [f"{counted(ranks, 'rank')}: {text}" for ranks, text in sorted(described)]
    return "; ".join(texts) or "none"

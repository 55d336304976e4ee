"""Where the numbers of a page are from: the run, how its ranks ran, and the commands that draw or measure it again."""

import json
import shlex

from labkit.bench.statistics import FALSE_DISCOVERY_RATE, MIN_RELEVANT_DIFFERENCE
from labkit.lab.calibration import LIMITS, calibration_told
from labkit.lab.config import AUTO, ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.html import piece
from labkit.lab.project import relative_to_project
from labkit.lab.runs.records import Resumption
from labkit.lab.runs.store import Run, RunHeader
from labkit.lab.units import counted
from labkit.machine.load import Load
from labkit.parallel.ranks.hosts import describe_hosts

RULE = (
    f"A difference counts if it is at least {100 * MIN_RELEVANT_DIFFERENCE:.0f}% and significant (false discovery "
    f"rate {FALSE_DISCOVERY_RATE:g} per question). Intervals are 95% and cover what varied within this run. A ratio is "
    "estimated from rounds, so it may differ from the ratio of two medians. Between sections compare ratios, not "
    "times: other processes measured them at another moment."
)


def provenance(lab: Lab, run: Run) -> str:
    """The card below a lab's last cell."""
    return piece("provenance", rows=[*provenance_rows(lab, run).items(), ("Differences", RULE)])


def provenance_rows(lab: Lab, run: Run) -> dict[str, str]:
    """The facts of the provenance card by their names."""
    path, load = relative_to_project(run.path), run.header.load
    rows = {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        **({"Resumed at": "; ".join(map(_describe_resumption, run.resumptions))} if run.resumptions else {}),
        "Draw again": f"labkit report {lab.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(lab, run.header),
        "Ranks": _describe_ranks(run),
        **({"Predicted from": calibration_told(run)} if lab.name != LIMITS else {}),
        **({"Load": _describe_load(load, run)} if load else {}),
    }
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    return rows


def _describe_resumption(resumption: Resumption) -> str:
    """When, at which commit and by which command a run was taken up again."""
    when = f"{resumption.at:%Y-%m-%d %H:%M:%S} UTC" if resumption.at else "a time that was not recorded"
    unknown = "not a git checkout" if "source" in resumption.model_fields_set else "commit not recorded"
    command = f", by {resumption.command}" if resumption.command else ""
    return f"{when}, {resumption.source or unknown}{command}"


def _describe_load(load: Load, run: Run) -> str:
    cores = run.header.machine.cores
    busy = "" if load.busy_cores is None else f", {load.busy_cores:.1f} of {cores} cores busy"
    gpu = load.gpu
    gpus = f"; GPUs at up to {gpu.temperature} °C, power limit {gpu.power_limit_w:.0f} W" if gpu else ""
    return f"at the start a load average of {load.average:.1f}{busy}{gpus}"


def _command_again(lab: Lab, header: RunHeader) -> str:
    """With the --set options that lead from the profile to the config of the run."""
    try:
        lab.configure(header.profile, header.config, header.machine)
    except ParameterError:
        return "by the notebook with the alternatives that it adds, or the labkit that measured it"
    profiles = lab.profiles_on(header.machine, header.config.get("device") or AUTO)
    profile = profiles[header.profile].model_dump(mode="json")
    changed = {name: value for name, value in header.config.items() if profile[name] != value}
    options = [f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()]
    return f"labkit report {lab.name} --profile {header.profile}" + "".join(options)


def _describe_ranks(run: Run) -> str:
    """How the ranks ran, as they reported it: start method, scheduling policy, threads, and code for shared memory."""
    needed = {"world_size", "backend", "start_method", "scheduling", "threads"}  # known once ranks are ready
    facts = [fact for fact in run.facts().values() if needed <= fact.keys() and isinstance(fact["world_size"], int)]
    described = {
        f"{counted(fact['world_size'], 'rank')}: {fact['backend'] or 'no process group'}, {fact['start_method']}, "
        f"scheduling {fact['scheduling']}, {counted(fact['threads'], 'thread')} each"
        f"{', shared memory ' + fact['shared_memory'] if 'shared_memory' in fact else ''}"
        for fact in facts
    }
    return "; ".join(sorted(described, key=lambda text: (int(text.split()[0]), text))) or "none"

"""Where the numbers of a page are from: the run, how its ranks ran, and the commands that draw or measure it again.

And what the page leaves of all this for the index.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from labkit.lab.answers import Answer
from labkit.lab.calibration import LIMITS, calibration_told
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages.agreement import known_record
from labkit.lab.pages.cards import machine_rows, not_measured
from labkit.lab.pages.html import piece
from labkit.lab.project import relative_to_project
from labkit.lab.runs.records import Resumption
from labkit.lab.runs.store import Run, RunHeader
from labkit.lab.units import counted
from labkit.machine.load import Load
from labkit.parallel.ranks.hosts import describe_hosts


def provenance(study: Lab, run: Run) -> str:
    """Where the page's numbers are, and the commands that draw or measure it again."""
    return piece("provenance", rows=provenance_rows(study, run).items())


def provenance_rows(study: Lab, run: Run) -> dict[str, str]:
    """The facts of the provenance card by their names."""
    path = relative_to_project(run.path)
    rows = {
        "Run": path,
        "Started": f"{run.header.started:%Y-%m-%d %H:%M:%S} UTC",
        "Measured by": run.header.command,
        **({"Resumed at": "; ".join(map(_resumed, run.resumptions))} if run.resumptions else {}),
        "Draw again": f"labkit report {study.name} --run {shlex.quote(path)}",
        "Measure again": _command_again(study, run.header),
        "Ranks": _ranks(run),
        **({"Predicted from": calibration_told(run)} if study.name != LIMITS else {}),
        **({"Load": _load(run.header.load, run.header.machine.cores)} if run.header.load else {}),
    }
    if run.header.ranks_by_host is not None:
        rows["Hosts"] = describe_hosts(run.header.ranks_by_host)
    return rows


def page_record(
    study: Lab, run: Run, answers: Mapping[str, Answer], figures: Mapping[str, str], *, elsewhere: bool
) -> dict[str, Any]:
    """What a page leaves for the index: of which run it is, what was found, and its figures' captions by name."""
    coverage, machine = run.coverage(), run.header.machine
    return {
        "lab": study.name,
        "title": study.title,
        "summary": study.summary,
        "run": relative_to_project(run.path),
        "profile": run.header.profile,
        "identity": machine.identity,
        "machine": machine.label,
        # pairs, because a saved notebook has the keys of its dictionaries in another order
        "machine_rows": list(machine_rows(machine, elsewhere=elsewhere).items()),
        "provenance": list(provenance_rows(study, run).items()),
        "started": run.header.started.isoformat(timespec="seconds"),
        "coverage": coverage["status"].value_counts().to_dict(),
        "duration_s": float(coverage["elapsed_s"].sum()),
        "not_measured": not_measured(run),
        "busy": len(run.busy),
        "known": known_record(study, run),
        "figures": figures,
        "answers": [
            {"question": {"id": question.id, "text": question.text, "topic": question.topic}}
            | answers[question.id].record()
            for question in study.questions
        ],
    }


def _resumed(again: Resumption) -> str:
    """When, at which commit and by which command a run was taken up again."""
    when = f"{again.at:%Y-%m-%d %H:%M:%S} UTC" if again.at else "a time that was not recorded"
    unknown = "not a git checkout" if "source" in again.model_fields_set else "commit not recorded"
    return f"{when}, {again.source or unknown}" + (f", by {again.command}" if again.command else "")


def _load(load: Load, cores: int) -> str:
    busy = "" if load.busy_cores is None else f", {load.busy_cores:.1f} of {cores} cores busy"
    return f"at the start a load average of {load.average:.1f}{busy}"


def _command_again(study: Lab, header: RunHeader) -> str:
    """With the --set options that lead from the profile to the config of the run."""
    try:
        study.configure(header.profile, header.config)
    except ParameterError:
        return "by the notebook with what is its own, or the labkit that measured it"
    profile = study.profiles[header.profile].model_dump(mode="json")
    changed = {name: value for name, value in header.config.items() if profile[name] != value}
    options = [f" --set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in changed.items()]
    return f"labkit report {study.name} --profile {header.profile}" + "".join(options)


def _ranks(run: Run) -> str:
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

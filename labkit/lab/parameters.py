"""Parameters of a notebook: `profile`, `run`, `config` and fields of the lab's config; checked
before any work."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from symtable import symtable
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from labkit.lab.config import LabConfig, ParameterError, check_names
from labkit.lab.declaration import Lab
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import find_run

COMMON_PARAMETERS = ("profile", "run", "config")
PAPERMILL_MARK = "# Parameters\n"  # first line of the cell that papermill adds
OPENS = "open_lab("


@dataclass(frozen=True)
class Parameters:
    """Checked parameters: the profile, the run to draw instead of measuring (or None), the
    config."""

    profile: str
    run: str | None
    config: LabConfig


def check_parameters(study: Lab, values: Mapping[str, Any]) -> Parameters:
    """Check the parameters of a notebook. ParameterError for a wrong name or value."""
    names = (*COMMON_PARAMETERS, *study.config.model_fields)
    more = values.get("config") or {}
    if not isinstance(more, dict) or any(name in more for name in COMMON_PARAMETERS):
        raise ParameterError(
            f"{study.name}: parameter 'config' should hold others by name, got {more!r:.80}"
        )
    check_names(study.name, (*values, *more), names)
    run = values.get("run")
    if run is not None and not isinstance(run, str):
        raise ParameterError(
            f"{study.name}: parameter 'run' should be the path of a run, got {run!r}"
        )
    if run is not None:
        locate_run(study, run)
    overrides = {
        name: value
        for name, value in values.items()
        if name not in COMMON_PARAMETERS and value is not None
    }
    if twice := overrides.keys() & more.keys():
        raise ParameterError(
            f"{study.name}: parameter {min(twice)!r} is set twice, in 'config' and outside it"
        )
    profile = values.get("profile", "quick")
    return Parameters(profile, run, study.configure(profile, overrides | more))


def locate_run(study: Lab, text: str) -> Path:
    """Find a run of a lab by its path, or by its name among the recorded ones and this
    machine's."""
    return find_run(
        [parent / study.name for parent in (recorded_directory(), runs_directory())], text
    )


def read_parameters(study: Lab, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the parameters that a notebook's cells have set, mistyped names included; `namespace`
    is its `globals()`.

    Every name counts in the last cell that sets `profile`, and in the cell that papermill adds
    below it; in later cells, and in a script, only names of parameters count. ParameterError if
    nothing sets `profile`, or if the parameters cell came after papermill's and has set its values
    back.
    """
    valid = (*COMMON_PARAMETERS, *study.config.model_fields)
    cells = [
        (source.lstrip().startswith(PAPERMILL_MARK), _assigned_names(source))
        for source in namespace.get("In", [])
    ]
    injected = [place for place, (is_papermills, _) in enumerate(cells) if is_papermills]
    setting = [place for place, (_, assigned) in enumerate(cells) if "profile" in assigned]
    readers = [place for place in setting if place not in injected] or setting
    if not setting and "profile" not in namespace:
        raise ParameterError("run the parameters cell first: no cell so far sets `profile`")
    if readers and injected and injected[0] < readers[0]:
        raise ParameterError(
            f"{study.name}: this cell sets back what papermill has passed: tag it `parameters`, and"
            " start again"
        )
    names = dict.fromkeys(cells[readers[-1]][1] if readers else valid)
    for is_papermills, assigned in cells[readers[-1] + 1 :] if readers else ():
        names |= dict.fromkeys(name for name in assigned if is_papermills or name in valid)
    return {name: namespace[name] for name in names if name in namespace}


def _assigned_names(source: str) -> list[str]:
    """Return names that a cell sets at its top level, above the line that opens a lab; none that
    begin with `_`."""
    lines = takewhile(lambda line: OPENS not in line, source.splitlines())
    try:
        symbols = symtable("\n".join(lines), "cell", "exec").get_symbols()
    except SyntaxError:  # it did not run either
        return []
    assigned = [
        one
        for one in symbols
        if one.is_assigned() and not one.is_imported() and not one.is_namespace()
    ]
    return [one.get_name() for one in assigned if not one.get_name().startswith("_")]


def literal_assignments(source: str) -> dict[str, Any]:
    """Read the `name = literal` statements of a parameters cell. ValueError for a value that is no
    literal."""
    values: dict[str, Any] = {}
    for statement in ast.parse(TransformerManager().transform_cell(source)).body:
        match statement:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                ast.Name(name), value=ast.expr() as value
            ):
                values[name] = ast.literal_eval(value)
    return values

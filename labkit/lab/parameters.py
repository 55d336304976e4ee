"""Parameters of a notebook: `profile`, `run`, `config`, and fields of the lab's config.

They reach the lab in three ways, and each is checked before any work: `open_lab(LAB, repeats=7)`
in a notebook or script; `labkit report --set`, which papermill writes below the parameters cell;
and papermill's own command line.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from labkit.lab.config import LabConfig, ParameterError, check_names
from labkit.lab.declaration import Lab
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import find_run

COMMON_PARAMETERS = ("profile", "run", "config")
# papermill marks the cell that it adds by a tag, which a kernel does not see, and this first line.
PAPERMILL_COMMENT = "# Parameters\n"


@dataclass(frozen=True)
class Parameters:
    """Checked parameters: the profile, the run to plot instead of measuring, the config."""

    profile: str
    run: str | None
    config: LabConfig


def check_parameters(study: Lab, values: Mapping[str, Any]) -> Parameters:
    """Check parameters and resolve the config. ParameterError for a wrong name or value."""
    config = values.get("config") or {}
    others = {name: value for name, value in values.items() if name not in COMMON_PARAMETERS}
    check_names(study.name, others, (*COMMON_PARAMETERS, *study.config.model_fields))
    # None in the parameters cell means: as the profile says.
    set_outside = {name: value for name, value in others.items() if value is not None}
    overrides = _merge(study, config, set_outside)
    run = values.get("run")
    if run is not None and not isinstance(run, str):
        raise ParameterError(
            f"{study.name}: parameter 'run' should be the path of a run, got {run!r}"
        )
    # Found again when it is read; a wrong name is refused here.
    if run is not None:
        locate_run(study, run)
    profile = values.get("profile", "quick")
    return Parameters(profile, run, study.configure(profile, overrides))


def locate_run(study: Lab, text: str) -> Path:
    """Find a run by its path, or by its name among the recorded runs and this machine's."""
    folders = [parent / study.name for parent in (recorded_directory(), runs_directory())]
    return find_run(folders, text)


def report_parameters(
    study: Lab, notebook: str, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], LabConfig]:
    """Return what papermill must set so that a report's parameters win over the notebook's.

    A parameter that the parameters cell does not set goes into its `config`. Returns the lab's
    config, too. ParameterError for a wrong name or value in either.
    """
    # papermill only warns of a name that the parameters cell does not set, and goes on without.
    in_cell = notebook_parameters(notebook, study.name)
    values = {name: value for name, value in parameters.items() if name in in_cell}
    others = {name: value for name, value in parameters.items() if name not in in_cell}
    if others:
        config = _merge(study, values.get("config") or {}, others)
        values["config"] = (in_cell.get("config") or {}) | config
    return values, check_parameters(study, in_cell | values).config


def notebook_parameters(text: str, name: str) -> dict[str, Any]:
    """Read the cell tagged `parameters`. ParameterError without one, or for what is no literal."""
    import nbformat  # a second to load, and a kernel that imports this module reads no notebook

    for cell in nbformat.reads(text, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            try:
                values = literal_assignments(cell.source)
            except (ValueError, SyntaxError) as error:
                message = f"{name}: the parameters cell cannot be read: {error}"
                raise ParameterError(message) from None
            if values:
                return values
    raise ParameterError(f"{name}: no cell is tagged `parameters` and sets some")


def literal_assignments(source: str) -> dict[str, Any]:
    """Read the `name = literal` statements of a cell. ValueError for a value that is no literal."""
    return {name: ast.literal_eval(value) for name, value in _assignments(source)}


def check_papermill_cell(study: Lab, cells: Sequence[str], passed: Mapping[str, Any]) -> None:
    """Refuse what papermill's own command line has set in vain; papermill itself only warns.

    Its cell is all that a kernel ever sees of that command line, so this looks for it among the
    `cells` that were executed, the oldest first. `passed` is what the notebook gave to `open_lab`.
    """
    numbers = [index for index, cell in enumerate(cells) if cell.startswith(PAPERMILL_COMMENT)]
    if not numbers:
        return
    names = [name for name, _ in _assignments(cells[numbers[-1]])]
    for name in names:
        if name in study.config.model_fields and name not in passed:
            raise ParameterError(
                f"{study.name}: this notebook does not set {name!r} in its parameters cell: pass it"
                f" to papermill as -y 'config: {{{name}: ...}}'"
            )
    check_names(study.name, names, passed)
    # Without a cell tagged `parameters`, papermill puts its cell above all others, and the
    # notebook's defaults overwrite it. `In[0]` is empty.
    first = dict(_assignments(cells[1])) if numbers[-1] == 1 else {}
    for name, value in first.items():
        try:
            is_lost = ast.literal_eval(value) != passed[name]
        except ValueError:  # computed: papermill writes literals
            continue
        if is_lost:
            raise ParameterError(
                f"{study.name}: papermill has set {name!r} in the first cell, and a later one has"
                " overwritten it: tag that one `parameters`, and start again"
            )


def _merge(study: Lab, config: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Add parameters to those in `config`. ParameterError for a name in both."""
    if not isinstance(config, dict) or any(name in config for name in COMMON_PARAMETERS):
        raise ParameterError(
            f"{study.name}: parameter 'config' should hold others by name, got {config!r:.80}"
        )
    twice = config.keys() & others.keys()
    if twice:
        raise ParameterError(
            f"{study.name}: parameter {min(twice)!r} is set twice, in 'config' and outside it"
        )
    return {**config, **others}


def _assignments(source: str) -> list[tuple[str, ast.expr]]:
    """Return names and values of the plain assignments at the top level of a cell."""
    assignments = []
    # IPython's own syntax, such as %magic and !command, is Python only after its transformation.
    for statement in ast.parse(TransformerManager().transform_cell(source)).body:
        match statement:
            case ast.Assign([ast.Name(name)], value):
                assignments.append((name, value))
            case ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                assignments.append((name, value))
    return assignments

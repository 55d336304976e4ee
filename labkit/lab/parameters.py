"""Parameters of a notebook: `profile`, `run`, `config` and fields of the lab's config; checked before any work."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from symtable import symtable
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from labkit.lab.config import LabConfig, ParameterError, nearest
from labkit.lab.declaration import Lab
from labkit.lab.project import recorded_directory, runs_directory
from labkit.lab.runs.store import find_run

COMMON_PARAMETERS = ("profile", "run", "config")
PAPERMILL_MARK = "# Parameters"  # the first line of the cell that papermill adds
OPENS = "open_lab("


@dataclass(frozen=True)
class Parameters:
    """Checked parameters: the profile, the run to draw instead of measuring (or None), the config."""

    profile: str
    run: str | None
    config: LabConfig


def parameter_names(study: Lab) -> tuple[str, ...]:
    """`profile`, `run`, `config`, and the fields of the lab's config."""
    return (*COMMON_PARAMETERS, *study.config.model_fields)


def check_parameters(study: Lab, values: Mapping[str, Any]) -> Parameters:
    """The parameters of a notebook. ParameterError for a wrong name or value."""
    names, more = parameter_names(study), values.get("config") or {}
    if not isinstance(more, dict) or any(name in more for name in COMMON_PARAMETERS):
        raise ParameterError(f"{study.name}: parameter 'config' should hold others by name, got {more!r:.80}")
    for name in (*values, *more):
        if name not in names:
            raise ParameterError(
                f"{study.name}: unknown parameter {name!r}{nearest(name, names)}; the parameters are {', '.join(names)}"
            )
    run = values.get("run")
    if run is not None and not isinstance(run, str):
        raise ParameterError(f"{study.name}: parameter 'run' should be the path of a run, got {run!r}")
    if run is not None:
        locate_run(study, run)
    overrides = {name: value for name, value in values.items() if name not in COMMON_PARAMETERS and value is not None}
    if twice := overrides.keys() & more.keys():
        raise ParameterError(f"{study.name}: parameter {min(twice)!r} is set twice, in 'config' and outside it")
    profile = values.get("profile", "quick")
    return Parameters(profile, run, study.configure(profile, overrides | more))


def locate_run(study: Lab, text: str) -> Path:
    """A run of a lab by its path, or by its name among the recorded ones and this machine's."""
    return find_run([parent / study.name for parent in (recorded_directory(), runs_directory())], text)


def read_parameters(study: Lab, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a notebook's cells have set, mistyped names included; `namespace` is its `globals()`.

    All names of the last cell that sets `profile`, and of the one that papermill adds below it; from later cells only
    names of parameters. A script has no cells, and only names of parameters count. ParameterError if nothing sets
    `profile`, or if the parameters cell came after papermill's and has set its values back.
    """
    parameters = parameter_names(study)
    own: list[str] = []
    more: list[str] = []
    is_own_marked = is_above = False
    for source in namespace.get("In", []):
        assigned = list(_assigned_names(source))
        is_marked = source.lstrip().splitlines()[:1] == [PAPERMILL_MARK]
        if is_marked and own and not is_own_marked:
            more = assigned
        elif "profile" in assigned:
            if is_above and not is_marked:
                raise ParameterError(
                    f"{study.name}: this cell sets back what papermill has passed: tag it `parameters`, and start again"
                )
            own, more, is_own_marked = assigned, [], is_marked
        else:
            more += [name for name in assigned if name in parameters]
        is_above |= is_marked and (is_own_marked or not own)
    if not own and "profile" not in namespace:
        raise ParameterError("run the parameters cell first: no cell so far sets `profile`")
    names = dict.fromkeys([*own, *more] if own else parameters)
    return {name: namespace[name] for name in names if name in namespace}


def _assigned_names(source: str) -> Iterator[str]:
    """Names that a cell sets at its top level, above the line that opens a lab; those with a leading _ are left out."""
    if source.lstrip().startswith("%%"):  # the body of a cell magic such as %%time
        source = source.lstrip().partition("\n")[2]
    lines = takewhile(lambda line: OPENS not in line, TransformerManager().transform_cell(source).splitlines())
    try:
        symbols = symtable("\n".join(lines), "cell", "exec").get_symbols()
    except SyntaxError:  # it did not run either
        return
    for symbol in symbols:
        is_variable = symbol.is_assigned() and not symbol.is_imported() and not symbol.is_namespace()
        if is_variable and not symbol.get_name().startswith("_"):
            yield symbol.get_name()


def literal_assignments(source: str) -> dict[str, Any]:
    """The `name = literal` statements of a parameters cell. ValueError for a value that is no literal."""
    values: dict[str, Any] = {}
    for statement in ast.parse(TransformerManager().transform_cell(source)).body:
        match statement:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                values[name] = ast.literal_eval(value)
    return values

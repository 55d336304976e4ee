"""Which parameters the cells of a notebook set: read off their source, nothing is run."""

import ast
from collections.abc import Mapping
from typing import Any

from labkit.lab.config import ParameterError


def given_parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by the cells that set them: the last parameters cell and the last one papermill added.

    Read from the kernel's history and not from all globals, so that a mistyped name is found wherever it was
    set, and a reader's own variables are left alone. ParameterError if no cell so far sets `profile`.
    """
    own: list[str] = []
    injected: list[str] = []
    for source in namespace.get("In", []):
        names = _assigned_names(source)
        if source.lstrip().startswith("# Parameters"):  # papermill's own mark
            injected = names
        elif "profile" in names:
            own, injected = names, []
    if not own:
        raise ParameterError("run the parameters cell first: no cell so far sets `profile`")
    return {name: namespace[name] for name in dict.fromkeys([*own, *injected]) if name in namespace}


def _assigned_names(source: str) -> list[str]:
    """Names that a cell of nothing but assignments sets; [] for any other cell."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return []
    names = []
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if not all(isinstance(target, ast.Name) for target in targets):
            return []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def literal_assignments(source: str) -> dict[str, Any]:
    """`name = literal` statements of a cell that holds nothing else; {} for any other cell."""
    values = {}
    try:
        for statement in ast.parse(source).body:
            if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                return {}
            values[statement.targets[0].id] = ast.literal_eval(statement.value)
    except (SyntaxError, ValueError):
        return {}
    return values

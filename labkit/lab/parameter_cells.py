"""Which parameters the cells of a notebook set: read off their source, nothing is run."""

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from labkit.lab.config import ParameterError

PAPERMILL_MARK = "# Parameters"  # the first line of the cell that papermill adds
OPENS = "open_lab"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def given_parameters(namespace: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Parameters by the cells that set them; `namespace` is the notebook's `globals()`.

    Every name that the last parameters cell (the one that sets `profile`) or the one that papermill added sets, so
    that a mistyped one is found; of later cells the names that are `known`, because other variables are the reader's
    own. A script has no cells: there it is the known names. ParameterError if nothing sets `profile`.
    """
    own: list[str] = []
    injected: list[str] = []
    later: list[str] = []
    is_own_marked = False
    for source in namespace.get("In", []):
        names = list(_assigned_names(source))
        is_marked = source.lstrip().splitlines()[:1] == [PAPERMILL_MARK]
        if is_marked and own and not is_own_marked:
            injected = names
        elif "profile" in names:
            own, injected, later, is_own_marked = names, [], [], is_marked
        else:
            later += [name for name in names if name in known]
    if not own and "profile" not in namespace:
        raise ParameterError("run the parameters cell first: no cell so far sets `profile`")
    names = [*own, *injected, *later] if own else list(known)
    return {name: namespace[name] for name in dict.fromkeys(names) if name in namespace}


def literal_assignments(source: str) -> dict[str, Any]:
    """The `name = literal` statements of a parameters cell; imports, calls, docstrings and magics set nothing.

    ValueError for a value that only running the cell would tell.
    """
    values: dict[str, Any] = {}
    for statement in _statements(source):
        if not any(_stored_names(statement)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        try:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or len(names) < len(targets):
                raise ValueError
            values |= dict.fromkeys(names, ast.literal_eval(statement.value or ""))
        except (ValueError, SyntaxError, TypeError):
            raise ValueError(f"expected `name = literal` lines, got {ast.unparse(statement)!r:.100}") from None
    return values


def _assigned_names(source: str) -> Iterator[str]:
    """Names that a cell sets, outside of functions and before it opens a lab; what begins with _ is the reader's."""
    try:
        statements = _statements(source)
    except SyntaxError:  # it did not run either
        return
    for statement in statements:
        if any(getattr(node, "id", getattr(node, "attr", None)) == OPENS for node in ast.walk(statement)):
            return
        yield from (name for name in _stored_names(statement) if not name.startswith("_"))


def _statements(source: str) -> list[ast.stmt]:
    """A cell as Python; the body of a cell magic such as %%time in place of the magic."""
    statements = ast.parse(TransformerManager().transform_cell(source)).body
    match statements:
        case [ast.Expr(ast.Call(ast.Attribute(attr="run_cell_magic"), [_, _, ast.Constant(str(body))]))]:
            return _statements(body)
    return statements


def _stored_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
        for child in ast.iter_child_nodes(node):
            yield from _stored_names(child)

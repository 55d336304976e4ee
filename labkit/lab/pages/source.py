"""The source of what a lab studies, highlighted, as a piece of a notebook or a page."""

import ast
import inspect
import linecache
from pathlib import Path
from textwrap import dedent
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labkit.lab.config import ParameterError
from labkit.lab.pages.cards import PIECE_MIME, Piece
from labkit.lab.pages.html import code_style, piece

SCOPE = ".labkit-source"  # the class of the piece, which holds no code of a notebook


def render_source(studied: Any) -> Piece:
    """Source and docstring of a function, method, class or module; for a `partial` or a wrapper, of what is inside.

    ParameterError for what has none in Python.
    """
    inside = inspect.unwrap(getattr(studied, "func", studied))
    try:
        text, first, file = _class_in_cell(inside) or _source_in_file(inside)
    except (TypeError, OSError):
        raise ParameterError(f"expected a function or class written in Python, got {studied!r:.80}") from None
    about = {
        "function": getattr(inside, "__qualname__", getattr(inside, "__name__", "source")),
        "place": f"{file.name}, line {max(first, 1)}" if file.is_file() else "this notebook",
        "code": Markup(highlight(text, PythonLexer(), HtmlFormatter(wrapcode=True))),
    }
    html = piece("source", **about, style=None)  # a page has the style
    return Piece(piece("source", **about, style=Markup(code_style(SCOPE))), text, {PIECE_MIME: {"html": html}})


def _source_in_file(inside: Any) -> tuple[str, int, Path]:
    """Text, first line and file. TypeError or OSError for what has none."""
    lines, first = inspect.getsourcelines(inside)
    return dedent("".join(lines)).rstrip(), first, Path(inspect.getsourcefile(inside) or "")


def _class_in_cell(inside: Any) -> tuple[str, int, Path] | None:
    """The same for a class that a cell defines, which `inspect` cannot find; its methods know their cell."""
    if not inspect.isclass(inside) or inside.__module__ != "__main__":
        return None
    for method in filter(inspect.isfunction, vars(inside).values()):
        cell = method.__code__.co_filename
        source = "".join(linecache.getlines(cell))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == inside.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno])), first, Path(cell)
    return None

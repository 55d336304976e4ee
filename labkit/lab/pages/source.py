"""The source of what a lab studies, highlighted, as a piece of a notebook or a page."""

import inspect
from pathlib import Path
from textwrap import dedent
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from labkit.lab.config import ParameterError
from labkit.lab.pages.cards import PIECE_MIME, Shown
from labkit.lab.pages.html import code_style, piece

SCOPE = ".labkit-source"  # the class of the piece, in which a notebook's own code does not stand


def shown_source(studied: Any) -> Shown:
    """Source and docstring of a function, method, class or module; of a `partial` or a wrapper, of what is inside.

    ValueError for what has none in Python.
    """
    inside = inspect.unwrap(getattr(studied, "func", studied))
    try:
        lines, first = inspect.getsourcelines(inside)
        file = Path(inspect.getsourcefile(inside) or "")
    except (TypeError, OSError):
        raise ParameterError(f"expected a function or class written in Python, got {studied!r:.80}") from None
    text = dedent("".join(lines)).rstrip()
    name = getattr(inside, "__qualname__", getattr(inside, "__name__", "source"))
    where = f"{file.name}, line {max(first, 1)}" if file.is_file() else "this notebook"
    code = Markup(highlight(text, PythonLexer(), HtmlFormatter(wrapcode=True)))
    about = {"function": name, "where": where, "code": code}
    html = piece("source", **about, style=None)  # a page has the style
    return Shown(piece("source", **about, style=Markup(code_style(SCOPE))), text, {PIECE_MIME: {"html": html}})

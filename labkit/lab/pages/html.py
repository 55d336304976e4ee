"""Templates of everything that is displayed: Jinja with autoescape on, so that nothing a run holds becomes markup."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pygments.formatters import HtmlFormatter

from labkit.lab.wording import capitalize

TEMPLATES = Path(__file__).parent / "templates"
_UNITS = r"(?:%|[nµm]?s|min|(?:[KMGT]i|[kMGTP])?B(?:/s)?|[MGTP]?FLOP(?:/s)?)(?!\w)"
_NOT_TEXT = r"<(script|style|svg|pre|code)\b.*?</\2>|<[^>]*>"
_BREAKS = re.compile(rf"({_NOT_TEXT})|(?<=[\d\]]) (?={_UNITS})", re.DOTALL)
_AMOUNT = re.compile(r"([\d.,%]+(?: to [\d.,%]+)?) ?(.*)")


def render(template: str, **values: Any) -> str:
    """A whole page."""
    return with_nonbreaking_units(_environment().get_template(template).render(**values))


def with_nonbreaking_units(page: str) -> str:
    """The page, its numbers on one line with their units."""
    return _BREAKS.sub(lambda match: match[1] or "\N{NO-BREAK SPACE}", page)


def piece(name: str, **values: Any) -> str:
    """One macro of `pieces.html.j2`: what notebooks and pages share."""
    macro = getattr(_environment().get_template("pieces.html.j2").module, name)
    return str(macro(**values))


def style_sheet() -> str:
    """The style of a page and of its pieces. The pieces' print rules come last, so that they win."""
    return (TEMPLATES / "style.css").read_text() + piece_style()


def piece_style() -> str:
    """The style of the pieces alone, which take the colors of whatever surrounds them."""
    return (TEMPLATES / "pieces.css").read_text()


def script() -> str:
    """A page's script: sorts tables, opens them for printing, displays the values of figures."""
    return "".join(path.read_text() for path in sorted(TEMPLATES.glob("*.js")))


def script_hash() -> str:
    """The page's script as its Content-Security-Policy names it, so that no other one runs in a page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}"


def code_style(scope: str = "") -> str:
    """Pygments' colors for light and dark pages; with a scope, for what is inside of it alone."""
    inside = f"{scope} .highlight".strip()
    light, dark = (HtmlFormatter(style=style).get_style_defs(inside) for style in ("default", "github-dark"))
    return f"{inside} {{ color: #1c2024 }}\n{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}"


def mark_code(text: str) -> Markup:
    """A sentence with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def statement(headline: str) -> str:
    """A headline without the verdict that stands next to it: "Yes: it is." -> "It is."."""
    return capitalize(re.sub(r"^(Yes|No|It depends)[:,] ", "", headline))


def strip_code(text: str) -> str:
    """A sentence without backticks."""
    return text.replace("`", "")


def split_change(change: str) -> tuple[str, str]:
    """A change as its amount, which is displayed in large, and the words after it."""
    match = _AMOUNT.match(change)
    return (match[1], match[2]) if match else ("", change)


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, cache_size=20
    )
    environment.filters |= {"mark_code": mark_code, "plain": strip_code, "sentence": capitalize}
    environment.filters |= {"split_change": split_change, "statement": statement}
    environment.globals |= {"script_hash": script_hash, "script": script, "style_sheet": style_sheet}
    return environment

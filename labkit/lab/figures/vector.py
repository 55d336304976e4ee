"""A figure as SVG that belongs to the page it stands in: its text is text, its colors are the page's, light or dark.

Colors become style-sheet variables (`pieces.css` sets them), fonts those of the page. What a reader can point at
travels along as numbers; the page's script shows it on hover, tap and arrow keys.
"""

import io
import json
import re
from typing import Any

import matplotlib as mpl

from labkit.lab.figures.style import GRID, PAGE, PALETTE, SOFT, TEXT, Plot

_VARIABLES = {color.lower(): f"var(--labkit-{index})" for index, color in enumerate(PALETTE)} | {
    TEXT.lower(): "currentColor",
    SOFT.lower(): "var(--labkit-soft)",
    GRID.lower(): "var(--labkit-grid)",
    PAGE.lower(): "var(--labkit-page)",
}
_HEAD = re.compile(r"^.*?(?=<svg )|<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", re.DOTALL)
_FAMILIES = re.compile(r"'DejaVu Sans'[^;\"]*")
_TAG = re.compile(r"<[^>]*>")
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")


def drawing(plot: Plot, salt: str) -> tuple[str, str]:
    """The figure as an SVG element without a size of its own, and what can be pointed at in it.

    That is JSON: left, top, right, bottom, in percent of the figure's size, and the text of each. `salt` tells the
    element's ids from those of other figures.
    """
    return _svg(plot, salt), _places(plot)


def _svg(plot: Plot, salt: str) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        plot.laid_out.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = _HEAD.sub("", buffer.getvalue())
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
    text = text.replace("xlink:href", "href")
    text = _TAG.sub(lambda tag: _LONG_NUMBER.sub(r"\1", tag[0]), text)  # to a hundredth of a point
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLES.get(color[0], color[0]), text)
    referred = set(re.findall(r"(?:url\(|href=\")#([\w.]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referred else "", text)
    text = _FAMILIES.sub("var(--labkit-font, sans-serif)", text)
    return re.sub(r"\s*\n\s*", " ", text).strip()


def _places(plot: Plot) -> str:
    """Where the marks stand since the figure was last drawn."""
    width, height = plot.figure.bbox.width, plot.figure.bbox.height
    found: list[list[Any]] = []
    for axis, left, bottom, right, top, text in plot.marks:
        (x0, y0), (x1, y1) = axis.transData.transform([(left, bottom), (right, top)])
        percent = (100 * x0 / width, 100 - 100 * y1 / height, 100 * x1 / width, 100 - 100 * y0 / height)
        found.append([*(round(float(value), 2) for value in percent), text])
    return json.dumps(found, ensure_ascii=False)

"""Figures of tidy frames, declared by a lab or drawn in a notebook; each is saved with exactly its
points.

``Lines``     a value over a numeric axis, with intervals
``Bars``      a value by category, side by side or stacked
``Areas``     parts of a whole over a numeric axis, stacked
``Timeline``  boxes in lanes: events, or a whole from its parts
"""

from labkit.lab.figures.bars import Areas, Bars, Timeline
from labkit.lab.figures.figure import Figure, Plot
from labkit.lab.figures.lines import Lines

__all__ = ["Areas", "Bars", "Figure", "Lines", "Plot", "Timeline"]

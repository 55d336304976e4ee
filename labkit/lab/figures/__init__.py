"""Figures of tidy frames, declared by a lab or drawn in a notebook, and saved with their points.

``Lines``     a value over a numeric axis, with intervals
``Bars``      a value by category, side by side or stacked
``Areas``     parts of a whole over a numeric axis, stacked
``Timeline``  boxes in lanes: events, or a whole from its parts

`draw` draws them. Declaring one does not import matplotlib, which takes 0.7 s.
"""

from labkit.lab.figures.figure import Areas, Bars, Figure, Lines, Timeline

__all__ = ["Areas", "Bars", "Figure", "Lines", "Timeline"]

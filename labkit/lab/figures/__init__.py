"""A few general plots over tidy frames. Each returns the figure and exactly the points it drew.

``lines``     a value over a numeric axis, with intervals
``bars``      a value by category, side by side or stacked
``areas``     parts of a whole over a numeric axis, stacked
``timeline``  what ran when, one lane a kind
``waterfall`` a whole from its parts, one box below the other
"""

from labkit.lab.figures.areas import areas
from labkit.lab.figures.bars import bars
from labkit.lab.figures.lines import lines
from labkit.lab.figures.style import Plot
from labkit.lab.figures.timeline import timeline
from labkit.lab.figures.waterfall import waterfall

__all__ = ["Plot", "areas", "bars", "lines", "timeline", "waterfall"]

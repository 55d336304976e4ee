"""Where an axis has its ticks, and how they are written: at round numbers, exactly."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from labkit.lab.columns import column

FEWEST_TICKS = 3  # on a logarithmic axis; fewer do not tell its scale
MOST_TICKS = 10  # of which the labels have room
LEAST_SPAN = 0.04  # of an axis, relative to its values: three digits tell its ticks from one another


def format_axis(axis: Any, name: str, is_log: bool) -> None:
    """Round ticks, with units where the column's name says what it is."""
    low, high = axis.get_view_interval()
    if (missing := LEAST_SPAN * max(abs(low), abs(high)) - (high - low)) > 0:
        axis.set_view_interval(low - missing / 2, high + missing / 2, ignore=True)
    if is_log:
        axis.set_major_locator(log_ticks(name))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(_PowersOfTwo() if name.endswith("bytes") else _round_numbers())
    axis.set_major_formatter(FuncFormatter(lambda value, _: column(name).form(value)))
    axis.set_minor_formatter(NullFormatter())


class _PowersOfTwo(Locator):
    """About six ticks, a power of two apart, as sizes in KiB and MiB are read."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None, "a locator belongs to an axis once it is asked"
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        step = 2.0 ** math.ceil(math.log2(max(vmax - vmin, 1e-9) / 6))
        return [step * index for index in range(math.ceil(vmin / step), math.floor(vmax / step) + 1)]


class _OneTwoFive(LogLocator):
    """Ticks at 1, 2 and 5 of each power of ten, or at the powers alone where that were too many; on an axis so short
    that they are too few, at equal distances.
    """

    def __init__(self) -> None:
        super().__init__(subs=(1, 2, 5), numticks=12)

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        ticks = super().tick_values(vmin, vmax)
        number = sum(vmin <= tick <= vmax for tick in ticks)
        if number > MOST_TICKS:
            return LogLocator(numticks=MOST_TICKS).tick_values(vmin, vmax)
        if number >= FEWEST_TICKS:
            return ticks
        return _round_numbers().tick_values(vmin, vmax)


def _round_numbers() -> Locator:
    """About five ticks at equal distances of 1, 2 or 5, which three digits write exactly."""
    return MaxNLocator(nbins=6, steps=[1, 2, 5, 10])


def log_ticks(name: str) -> Locator:
    if name.endswith("bytes"):
        return LogLocator(base=32 if name == "n_bytes" else 2, numticks=8)
    return LogLocator(base=2) if column(name).doubles else _OneTwoFive()

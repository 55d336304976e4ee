"""Numbers as people read them: times, sizes and rates with a unit and three digits."""

import math
from collections.abc import Iterable

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_SIZE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_seconds(seconds: float) -> str:
    """0.00123 -> "1.23 ms". Above two minutes as minutes and seconds."""
    if math.isnan(seconds):
        return "not measured"
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds == 0:
        return "0 s"
    scale, unit = next((entry for entry in _TIME_UNITS if abs(seconds) >= entry[0]), _TIME_UNITS[-1])
    return f"{_three_digits(seconds / scale)} {unit}"


def format_bytes(n_bytes: float) -> str:
    """65536 -> "64 KiB"; binary units, as sizes of tensors usually are."""
    return _scale(n_bytes, _SIZE_UNITS, "B")


def format_rate(bytes_per_s: float) -> str:
    """1.5e9 -> "1.5 GB/s"; decimal units, as bandwidths usually are."""
    return _scale(bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")), "B/s")


def format_flops(flops: float) -> str:
    """2.5e9 -> "2.5 GFLOP"."""
    return _scale(flops, ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")), "FLOP")


def format_number(value: float) -> str:
    """Three digits, and from a thousand on whole numbers with separators: 0.784, 1,822."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.3g}"


def format_factor(value: float) -> str:
    """1.25 -> "1.2", 3.0 -> "3", 47.3 -> "47"; "many" of what is zero or less."""
    if math.isinf(value):
        return "many"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """1, "rank" -> "1 rank"; 2, "rank" -> "2 ranks"; 2, "quantity" -> "2 quantities"."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("ty") else f"{number} {noun}s"


def join_words(words: list[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _scale(value: float, units: Iterable[tuple[float, str]], smallest: str) -> str:
    """In the largest unit of which there is one at least, or whole in the smallest."""
    if math.isnan(value):
        return "not measured"
    for scale, unit in units:
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:.0f} {smallest}"

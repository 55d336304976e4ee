"""An advice as a verdict, a sentence and tables, for the screen and the page.

Each table says where its numbers come from: *predicted*, *published* or *measured by you*.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.lab.advise.request import AdviceRequest
from labkit.lab.units import format_seconds, join_words
from labkit.scaling.advice import sums_s
from labkit.scaling.layout import Layout
from labkit.scaling.model import parameters
from labkit.scaling.prediction import Prediction
from labkit.scaling.published import PublishedRow
from labkit.scaling.search import Request

PREDICTED, PUBLISHED, YOURS = "predicted", "published", "measured by you"
SHARDS = {
    "none": "whole copies",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "hsdp": "FSDP inside nodes",
}
PARTS = {
    "compute": "compute",
    "launch": "CPU launches",
    "tensor_parallel": "tensor-parallel collectives",
    "context_parallel": "keys and values around the ring",
    "gather": "gathering parameters",
    "pipeline": "pipeline bubble and transfers",
    "data_parallel": "gradient reduction",
    "optimizer": "optimizer",
    "stragglers": "waiting for the slowest node",
}
"""Names of the sums in `labkit.scaling.advice.SUMS`."""
CLEAR = 0.01
"""A predicted difference below this is none."""


@dataclass(frozen=True)
class Step:
    """The parts of a step in seconds, and its 90% interval (nan if it was measured)."""

    name: str
    parts_s: Sequence[tuple[str, float]]
    interval_s: tuple[float, float]


@dataclass(frozen=True)
class Section:
    """A table with a heading; `mark` says where its numbers come from.

    Rows beyond `max_rows` are only on the page, as are `steps`, a figure below it.
    """

    title: str
    mark: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    max_rows: int | None = None
    note: str = ""
    steps: Sequence[Step] = ()

    def lines(self) -> Iterator[str]:
        """The title, the headings and the rows that a screen has room for."""
        yield f"{self.title} ({self.mark})"
        rows = [self.headings, *self.rows[: self.max_rows]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@dataclass(frozen=True)
class Report:
    """A verdict, one sentence, the subject, tables and notes."""

    verdict: str
    headline: str
    about: str
    sections: Sequence[Section]
    notes: Sequence[str]

    def lines(self) -> Iterator[str]:
        """The report on one screen of a terminal."""
        yield from (self.verdict, self.headline, f"  {self.about}")
        for section in self.sections:
            yield from ("", *section.lines())
        if self.notes:
            yield from ("", *self.notes)


def describe_layout(layout: Layout) -> str:
    """Degrees and sharding: "tp 2, dp 16, ZeRO-1"."""
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
    if layout.vp > 1:
        degrees.append(f"{layout.vp} chunks per stage")
    if layout.dp * layout.cp > 1:
        degrees.append(SHARDS[layout.shard])
    return ", ".join(degrees) or "one GPU"


def format_count(value: float) -> str:
    """1234567 -> "1.23 M"; tokens, parameters."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def format_percent(share: float) -> str:
    """0.123 -> "12%"."""
    if 0 < abs(share) < 1e-3:
        return "below 0.1%"
    return f"{100 * share:.0f}%" if abs(share) >= 0.095 else f"{100 * share:.2g}%"


def format_change(share: float) -> str:
    """A difference: "+12%"."""
    return "no clear difference" if abs(share) < CLEAR else f"{'+' if share > 0 else '-'}{format_percent(abs(share))}"


def predicted_step(name: str, one: Prediction) -> Step:
    """A predicted step under a name, without the parts that take no time."""
    parts = [(PARTS[part], value) for part, value in sums_s(one).items() if value > 0]
    return Step(name, parts, one.interval_90)


def describe_request(request: Request) -> str:
    """Model, GPUs, batch and precision in one line."""
    hardware = request.hardware
    nodes = f", {hardware.network_gbps:g} Gb/s per node" if request.gpus > hardware.gpus_per_node else ""
    return (
        f"{request.model.name} ({format_count(float(parameters(request.model)))} parameters) on {request.gpus} x "
        f"{hardware.name}{nodes}; {format_count(request.tokens)} tokens per step, sequences of {request.seq_len}, "
        f"{request.precision}"
    )


def list_notes(request: AdviceRequest, rows: Sequence[PublishedRow], warnings: Sequence[str]) -> list[str]:
    """How wrong this may be, its assumptions, and where it extrapolates."""
    notes = []
    if rows:
        errors = np.abs([row.error for row in rows])
        median, worst = format_percent(float(np.median(errors))), format_percent(float(errors.max()))
        notes.append(
            f"Predicted: on the {len(rows)} nearest published rows, without having seen them, the median error is "
            f"{median}, the largest {worst}. [ ] holds 90% of such errors."
        )
    if request.calibration_runs:
        error = format_percent(request.calibration_error)
        notes.append(f"Calibrated on {request.calibration_runs} runs of yours ({YOURS}), explained to {error}.")
    if request.assumptions:
        notes.append(f"Assumed: {join_words(list(request.assumptions))}.")
    warnings = [warning for warning in warnings if not warning.startswith(("unstable", "expected to run"))]
    if request.request.framework == "generic":
        warnings = [warning for warning in warnings if not warning.startswith("framework")]
        notes.append("No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the intervals.")
    return [*notes, *(f"Beware: {warning}." for warning in warnings)]


def nearest_section(rows: Sequence[PublishedRow]) -> Section:
    """The published rows nearest to the request, and how wrong the prediction of each is."""
    cells = [
        (
            f"{row.group}: {row.model}",
            f"{row.gpus} x {row.gpu}",
            row.arrangement,
            format_seconds(row.step_s),
            format_percent(row.mfu) if np.isfinite(row.mfu) else "",
            f"{100 * row.error:+.0f}%",
            f"{row.distance:.2g}",
        )
        for row in rows
    ]
    headings = ("published row", "GPUs", "layout", "step", "MFU", "predicted, off by", "distance")
    note = "Distance 1 is a doubling of the model, or half the way to another kind of GPU."
    return Section("The nearest published rows", PUBLISHED, headings, cells, 3, note=note)

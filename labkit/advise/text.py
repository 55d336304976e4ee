"""The parts of a report of `labkit advise`, and its numbers in words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from labkit.lab.commands.console import table_lines
from labkit.scaling.prediction import Prediction
from labkit.scaling.search import Request

# A smaller predicted difference is a tie: the predictor's error is larger.
CLEAR = 0.03


@dataclass(frozen=True)
class Section:
    """A table; its title ends with where its numbers come from."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Report:
    """A verdict, one sentence, the subject, tables and notes."""

    verdict: str
    headline: str
    about: str
    sections: Sequence[Section]
    notes: Sequence[str]

    def lines(self) -> Iterator[str]:
        """Yield the report on one screen of a terminal."""
        yield from (self.verdict, self.headline, f"  {self.about}")
        for section in self.sections:
            yield from ("", section.title)
            yield from (f"  {line}" for line in table_lines(section.rows, *section.headings))
        yield from ("", *self.notes)


def describe_request(request: Request) -> str:
    """Return model, GPUs, batch and precision in one line."""
    hardware = request.hardware
    # A network that GPUs of one node do not use would seem to matter.
    network = ""
    if request.gpus > hardware.gpus_per_node:
        network = f", {hardware.network_gbps:g} Gb/s per node"
    return (
        f"{request.model.name} ({format_count(float(request.model.parameters))} parameters) on"
        f" {request.gpus} x {hardware.name}{network}; {format_count(request.tokens)} tokens per"
        f" step, sequences of {request.seq_len}, {request.precision}"
    )


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
    """Return a difference: "+12%"."""
    if abs(share) < CLEAR:
        return "about the same"
    sign = "+" if share > 0 else "-"
    return sign + format_percent(abs(share))


def with_interval(
    one: Prediction, value: Callable[[float], float], text: Callable[[float], str]
) -> str:
    """Return a quantity of the predicted step in seconds, and of the ends of its interval."""
    low, high = sorted(map(value, one.interval_90))
    return f"{text(value(one.step_s))} [{text(low)}, {text(high)}]"


def peak_text(one: Prediction) -> str:
    """The peak of the fullest GPU in GiB, and the ends of its interval."""
    low, high = one.peak_90
    return f"{one.peak_gib:.0f} [{low:.0f}, {high:.0f}]"


def memory_text(one: Prediction, memory_gib: float) -> str:
    """Memory of the fullest GPU, with the risk of running out if there is one."""
    risk = "" if one.fits else f", {format_percent(one.out_of_memory)} risk"
    return f"{peak_text(one)} of {memory_gib:.0f} GiB{risk}"

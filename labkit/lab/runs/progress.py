"""Progress of a measurement, as a line in a terminal or in a notebook."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from labkit.lab.units import format_seconds

PROGRESS_MIME = "application/vnd.labkit.progress+json"


@dataclass(frozen=True)
class Progress:
    """State of a measurement: `done` of `total` points, and the point that is being measured."""

    done: int
    total: int
    text: str
    elapsed_s: float = 0.0
    """Seconds since this process began to measure."""
    run: str | None = None
    """Name of the run, by which it can be resumed; None before it exists."""
    left_s: float | None = None
    """Expected seconds until the last point ends; None before it exists."""

    def line(self, waited_s: float = 0.0) -> str:
        """Say "3 of 9 points   61 s so far   about 40 s left   ring", `waited_s` later."""
        parts = [f"{self.done} of {self.total} points"]
        if self.run is not None:
            parts.append(f"{format_seconds(round(self.elapsed_s + waited_s))} so far")
        if self.left_s is not None and self.left_s > waited_s:
            parts.append(f"about {format_seconds(round(self.left_s - waited_s))} left")
        return "   ".join(filter(None, [*parts, self.text]))


ShowProgress = Callable[[Progress], None]


@contextmanager
def terminal_line(console: Console, name: str) -> Iterator[ShowProgress]:
    """Show a line that begins with `name`, whose time runs on between updates; none in a file."""
    last: Progress | None = None
    updated_s = 0.0

    def update(progress: Progress) -> None:
        nonlocal last, updated_s
        last = progress
        updated_s = time.monotonic()

    def render() -> Text:
        state = "starting"
        if last is not None:
            state = last.line(time.monotonic() - updated_s)
        return Text(f"{name}: {state}", no_wrap=True, overflow="ellipsis")

    # rich asks `render` several times a second: a point may take minutes between two updates.
    with Live(console=console, transient=True, get_renderable=render):
        yield update


class NotebookLine:
    """One output of the running cell, replaced in place: progress, and in the end the coverage."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, progress: Progress) -> None:
        from labkit.lab.pages.html import piece

        self.show(piece("progress", text=progress.line()), asdict(progress))

    def show(self, html: str, record: Mapping[str, Any] | None = None) -> None:
        """Display `html`; `record` is the progress for the program that executes the notebook."""
        from IPython.display import display

        bundle = {"text/html": html, "text/plain": "", PROGRESS_MIME: dict(record or {})}
        # Replaced, not added: a saved notebook keeps what is displayed last.
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class MeasuringInterrupted(KeyboardInterrupt):
    """The reader stopped a measurement. A notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:  # IPython calls it
        return [f"KeyboardInterrupt: {self}"]

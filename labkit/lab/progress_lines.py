"""The line that says how far a measurement is: replaced in place in a notebook, kept up to date in a terminal."""

import threading
import time
from contextvars import copy_context
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display
from rich.console import Console

from labkit.lab.pages import cards
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.store import Run
from labkit.lab.terminal_line import terminal_line

PROGRESS_MIME = "application/vnd.labkit.progress+json"
TICK_S = 5.0  # each costs the machine that is measured some milliseconds


def progress_line() -> "NotebookLine | ConsoleLine":
    """The line for where this runs: a notebook, or the console of IPython or Python."""
    return NotebookLine() if hasattr(get_ipython(), "kernel") else ConsoleLine()


class NotebookLine:
    """One output that is replaced in place, whose time goes on, and which in the end says what was covered."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._last: Progress | None = None
        self._since = 0.0
        self._showing, self._over = threading.Lock(), threading.Event()
        # in this context: what a thread shows belongs to the cell that is running
        self._clock = threading.Thread(target=copy_context().run, args=(self._tick,), daemon=True)

    def __enter__(self) -> Self:
        self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Say that it was interrupted, in place of what was being measured."""
        self._over.set()
        self._clock.join()
        if kind is KeyboardInterrupt and self._last is not None:
            self.update(replace(self._now(self._last), text="interrupted", left_s=None))

    def update(self, progress: Progress) -> None:
        with self._showing:
            self._last, self._since = progress, time.monotonic()
            self._show(cards.progress(progress), asdict(progress))

    def _now(self, last: Progress) -> Progress:
        return last.after(time.monotonic() - self._since)

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            with self._showing:
                if self._last is not None:
                    now = self._now(self._last)
                    self._show(cards.progress(now), asdict(now))

    def finish(self, run: Run) -> None:
        self._show(cards.coverage(run), {})

    def _show(self, html: str, record: dict[str, Any]) -> None:
        bundle = {"text/html": html, "text/plain": "", PROGRESS_MIME: record}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class ConsoleLine:
    """A line of the terminal while it is open; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._context = terminal_line(Console(stderr=True, highlight=False), "measuring")
        self.update: ShowProgress = lambda progress: None

    def __enter__(self) -> Self:
        self.update = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def finish(self, run: Run) -> None:
        display(cards.Piece(cards.coverage(run), cards.coverage_line(run)))


class MeasuringInterrupted(KeyboardInterrupt):
    """The reader stopped a measurement. A notebook shows the message alone: where it was stopped tells nothing."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"KeyboardInterrupt: {self}"]

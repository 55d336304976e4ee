"""The line of a notebook that says how far a measurement is, replaced in place; and of its interruption."""

import threading
import time
from contextvars import copy_context
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from labkit.lab.pages import cards
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.runs.store import Run

PROGRESS_MIME = "application/vnd.labkit.progress+json"
TICK_S = 5.0  # each costs the machine that is measured some milliseconds


def notebook_line() -> "NotebookLine | None":
    """A line if this runs in a notebook; None in a console or a script."""
    return NotebookLine() if hasattr(get_ipython(), "kernel") else None


class NotebookLine:
    """One output whose time goes on while a point is measured, and which in the end shows the coverage."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._last: tuple[Progress, float] | None = None
        self._lock, self._is_over = threading.Lock(), threading.Event()
        # in this context: what a thread shows belongs to the cell that is running
        self._clock = threading.Thread(target=copy_context().run, args=(self._tick,), daemon=True)

    def __enter__(self) -> ShowProgress:
        self._clock.start()
        return self.update

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Say that it was interrupted, in place of what was being measured."""
        self._is_over.set()
        self._clock.join()
        if kind is KeyboardInterrupt and self._last is not None:
            self._show_progress(replace(self._now(*self._last), text="interrupted", left_s=None))

    def update(self, progress: Progress) -> None:
        with self._lock:
            self._last = progress, time.monotonic()
            self._show_progress(progress)

    def finish(self, run: Run) -> None:
        self._show(cards.coverage(run).data, {})

    def _tick(self) -> None:
        while not self._is_over.wait(TICK_S):
            with self._lock:
                if self._last is not None:
                    self._show_progress(self._now(*self._last))

    def _now(self, progress: Progress, since: float) -> Progress:
        return progress.after(time.monotonic() - since)

    def _show_progress(self, progress: Progress) -> None:
        self._show(cards.progress(progress), asdict(progress))

    def _show(self, html: str, record: dict[str, Any]) -> None:
        bundle = {"text/html": html, "text/plain": "", PROGRESS_MIME: record}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class MeasuringInterrupted(KeyboardInterrupt):
    """The reader stopped a measurement. A notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"KeyboardInterrupt: {self}"]

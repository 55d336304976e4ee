"""The line of a terminal that says how far a measurement is; where there is no terminal, nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from labkit.lab.runs.progress import Progress, ShowProgress


@contextmanager
def terminal_line(console: Console, name: str) -> Iterator[ShowProgress]:
    """A line on `console` that begins with `name`, and whose time goes on between two updates."""
    with console.status(f"{name}: starting") as status:
        yield lambda progress: status.update(_Ticking(name, progress))


class _Ticking:
    """rich asks for the text each time it draws the line."""

    def __init__(self, name: str, progress: Progress):
        self._name, self._progress, self._since = name, progress, time.monotonic()

    def __rich__(self) -> Text:
        state = self._progress.after(time.monotonic() - self._since)
        parts = (f"{self._name}: {state.done} of {state.total}", state.times(), state.text)
        return Text("  ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")

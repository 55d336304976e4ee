"""Tables that several answers about a frame are made of: made once for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps

import pandas as pd

Table = Callable[[pd.DataFrame], pd.DataFrame]
# By function and frame; the frame is kept with its table, as another could get its id.
_Made = dict[tuple[Table, int], tuple[pd.DataFrame, pd.DataFrame]]
_made: ContextVar[_Made | None] = ContextVar("_made", default=None)


@contextmanager
def unchanged_frames() -> Iterator[None]:
    """Until the end, no frame changes that a table is made of; so it is made once."""
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def made_once(table: Table) -> Table:
    """Where frames are `unchanged_frames`, `table(frame)` is made once; every caller gets a copy of its own."""

    @wraps(table)
    def made(frame: pd.DataFrame) -> pd.DataFrame:
        if (known := _made.get()) is None:
            return table(frame)
        key = (table, id(frame))
        if key not in known:
            known[key] = frame, table(frame)
        return known[key][1].copy()

    return made

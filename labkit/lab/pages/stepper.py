"""The messages of all-reduces, step by step: recorded from the real functions, to be gone through by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from labkit.lab.pages.cards import Piece
from labkit.lab.pages.html import piece, piece_style, script
from labkit.lab.units import join_words
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.schedule import record_schedule


def stepper(
    algorithms: Mapping[str, Callable[..., None]] = ALGORITHMS, world_sizes: Sequence[int] = tuple(range(2, 9))
) -> Piece:
    """Each all-reduce of `algorithms`, by name, over each number of ranks: the last expression of a cell.

    A user-defined function is called as those of `labkit.parallel.collectives` are, with a `transport`. ValueError for
    numbers of ranks that `record_schedule` refuses; whatever a function raises.
    """
    names = {name: name.replace("_", " ") for name in algorithms}
    schedules = {
        name: {p: record_schedule(all_reduce, p)._asdict() for p in world_sizes}
        for name, all_reduce in algorithms.items()
    }
    about: dict[str, Any] = {"names": names, "world_sizes": world_sizes, "schedules": htmlsafe_json_dumps(schedules)}
    in_notebook = {"style": Markup(piece_style()), "script": Markup(script())}
    on_page = piece("stepper", **about, inline=None)
    text = f"The messages of {join_words(list(names.values()))}, to be gone through in a notebook or on a page."
    return Piece(piece("stepper", **about, inline=in_notebook), text, on_page=on_page)

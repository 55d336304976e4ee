"""The messages of all-reduces, step by step: recorded from the real functions, to be gone through by hand."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from labkit.lab.pages.cards import PIECE_MIME, Piece
from labkit.lab.pages.html import piece, piece_style, script
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
    text = "\n".join(
        f"{names[name]}, {p} ranks: {len(schedule['held']) - 1} steps, {len(schedule['messages'])} messages"
        for name, by_ranks in schedules.items()
        for p, schedule in by_ranks.items()
    )
    on_page = piece("stepper", **about, own=None)
    return Piece(piece("stepper", **about, own=in_notebook), text, {PIECE_MIME: {"html": on_page}})

"""What a worker answers, as it leaves a rank: rows that JSON can carry, and the exception that ended a point.

The same whether the rank was started here or is one of a torchrun job. Standard library only: a rank imports this
before torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from labkit.parallel.ranks import whose_turn
from labkit.parallel.ranks.outcome import is_out_of_memory, reads_as_consequence

Worker = Callable[[Any], Iterable[Mapping[str, Any]] | None]


def rows_of(worker: Worker, point: Any) -> Iterator[dict[str, Any]]:
    """What the worker yields for a point, each row checked and made plain as it comes."""
    rows = worker(point)
    if rows is None:
        return
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise TypeError(f"a worker yields rows or returns a list of them, but it returned a {_kind(rows)}")
    for row in rows:
        yield plain_row(row)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as JSON has it: scalars of numpy and torch become numbers, tuples become lists.

    NaN and infinities pass. Raises TypeError naming the value that JSON cannot carry. A tensor or array with
    dimensions is such a value, even with one element: the worker says what number it means. So is a mapping whose
    keys are no strings, which JSON would make of them.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"a row is a mapping from names to values, but the worker yielded a {_kind(row)}: {row!r:.80}")
    for name, value in row.items():
        if not isinstance(name, str):
            raise TypeError(f"a row's names are strings, but the worker yielded {name!r:.80}")
        try:
            _check_keys(value)
            json.dumps(value, default=_number)
        except (TypeError, ValueError) as error:
            raise TypeError(f"row value {name!r} is not JSON-able: {error} ({value!r:.80})") from None
    return json.loads(json.dumps(row, default=_number))


def release_device_memory() -> None:
    """At the end of a point: what its tensors took on a GPU goes back to the device, to which other ranks may come.

    torch's allocator keeps what is freed, and a model that hooks lead back to is freed by the garbage collector only.
    """
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a device that is lost says so to the next point
            torch.cuda.empty_cache()


def described(error: BaseException) -> dict[str, Any]:
    """An exception as it travels: one line, the traceback, and what sort of thing it is."""
    name, text = type(error).__qualname__, str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    return {
        "message": f"{name}: {first_line}" if first_line else name,
        "traceback": "".join(traceback.format_exception(error)),
        "oom": is_out_of_memory(error),
        "consequence": _is_consequence(error),
        "blamed": whose_turn.blamed(),
    }


def _check_keys(value: Any) -> None:
    """TypeError for a mapping, wherever it is inside of the value, with a key that JSON would change."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, not {_kind(key)}")
            _check_keys(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            _check_keys(inside)


def _number(value: Any) -> Any:
    """JSON's way out for what it does not know: a scalar of numpy or torch is a number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"it holds a {_kind(value)}")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _is_consequence(error: BaseException | None) -> bool:
    """Whether this, or what it was raised from, is the loss of another rank."""
    while error is not None:
        if isinstance(error, RuntimeError | OSError) and reads_as_consequence(str(error)):
            return True
        error = error.__cause__
    return False

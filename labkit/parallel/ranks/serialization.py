"""Pickles what a rank needs: names of what can be imported, the rest by value."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any

import cloudpickle


def serialize(content: Any) -> bytes:
    """Pickle a worker with its points; ValueError if that is not possible."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(content)
    except Exception as error:
        raise ValueError(
            f"worker, points: expected what cloudpickle can send to a rank: {error}"
        ) from error
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[type[CodeType], tuple[Any, ...]]:
    # cloudpickle leaves out the name of a function's file since 3.1.3; tracebacks and pdb need it.
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

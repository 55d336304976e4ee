"""A worker and its points as ranks get them: by cloudpickle, with the names of the files that functions are from."""

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def packed(worker: Any, points: list[Any]) -> bytes:
    """For `pickle.loads`; what is defined in `__main__` or in a function goes by value. ValueError for what cannot."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump((worker, points))
    except Exception as error:
        raise ValueError(f"worker, points: expected what cloudpickle can send to a rank: {error}") from error
    return file.getvalue()


def _reduced(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _made, (code.co_filename, make, arguments)


def _made(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """From 3.1.3 on, cloudpickle leaves the name of the file out, and a mistake in a script could not be told where."""

    dispatch_table = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)

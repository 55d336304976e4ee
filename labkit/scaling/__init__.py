"""Predicts training steps on 1 to 16,384 GPUs, with intervals. Imports no torch.

`predict(run)` gives seconds with intervals, a breakdown that adds up, and memory;
`rank` the best layouts; `calibrate` constants for a site with three runs or more.

``models`` ``hardware`` ``runs`` ``table``        the question
``step_time`` ``communication`` ``memory``        formulas
``constants`` and `data/reference/scaling/`       numbers, with their sources
``published`` ``intervals``                       measured runs, and the errors
``prediction`` ``search``                         answers
``scores``                                        frames for a notebook
"""

import csv
import json
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

DATA = Path(__file__).parents[1] / "shipped" / "data" / "reference" / "scaling"

Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
T = TypeVar("T")
# Pydantic compiles a validator per class, which takes longer than a row does.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read_table(name: str, *, beginning: str = "") -> list[dict[str, str]]:
    """Return the filled cells of `data/reference/scaling/NAME.csv` by column, row by row.

    With `beginning`, only rows whose line begins so: the others need not be parsed.
    """
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        header = next(file)
        lines = (line for line in file if line.startswith(beginning))
        return [
            {column: text for column, text in row.items() if text}
            for row in csv.DictReader(chain([header], lines))
        ]


def validate(
    kind: type[T], values: Mapping[str, Any], *, keys: Mapping[str, str] | None = None
) -> T:
    """Make an instance of a dataclass from values by field; None is the default.

    Numbers may be texts, unless a JSON file's `keys` of the fields are given: there, 32 and "32"
    differ. ValueError for the first wrong field.
    """
    adapter = _adapter(kind)
    present = {name: value for name, value in values.items() if value is not None}
    try:
        if keys is not None:
            result: T = adapter.validate_json(json.dumps(present), strict=True)
        else:
            result = adapter.validate_python(present)
    except ValidationError as error:
        name, problem = first_problem(error)
        # A reader knows the file's own name of a field.
        name = (keys or {}).get(name, name)
        if name:
            problem = f"expected {name} {problem.replace('should', 'to', 1)}"
        raise ValueError(problem) from None
    return result


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the first wrong field and its problem: "should be a valid integer, got 'x'".

    The field is empty if several are wrong together.
    """
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "missing":
        return name, "should be stated"
    if name:
        message += f", got {str(first['input'])[:40]!r}"
    return name, message

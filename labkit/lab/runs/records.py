"""The lines of a run's file after its header, checked as they are read: a run may come from anybody."""

from collections.abc import Container
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from labkit.machine import Source
from labkit.machine.load import Load

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)


class _Row(_Record):
    kind: Literal["row"]
    point: str
    rank: int
    values: dict[str, Any]


class _Facts(_Record):
    """What ranks said of themselves: these are counted with, others are told as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    world_size: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] = 1


class _End(_Record):
    kind: Literal["end"]
    point: str
    status: Status
    reason: str | None
    elapsed_s: float
    facts: _Facts = _Facts()
    load: Load | None = None


class _Again(_Record):
    """A point is measured again, without an alternative that failed: its rows so far do not count."""

    kind: Literal["again"]
    point: str
    alternative: str
    reason: str
    details: str = ""


class Resumption(BaseModel):
    """A run was taken up again: when, from which source, by which command. Old files lack some of it."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["resumed"] = "resumed"
    at: datetime | None = None
    command: str | None = None
    source: Source | None = Field(default=None, validation_alias=AliasChoices("source", "git"))  # `git` in older runs


_MODELS: dict[str, TypeAdapter[Any]] = {
    "row": TypeAdapter(_Row),
    "end": TypeAdapter(_End),
    "again": TypeAdapter(_Again),
    "resumed": TypeAdapter(Resumption),
}


def check_record(record: dict[str, Any], planned: Container[str]) -> None:
    """ValueError in one line for what is not a record of a run in which these points are planned."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ValueError(f"its kind is {kind!r:.40}, not one of {', '.join(_MODELS)}")
    try:
        _MODELS[kind].validate_python(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if kind != "resumed" and record["point"] not in planned:
        raise ValueError(f"the point {record['point']!r:.40} is not in the plan")
    if kind == "row" and len({len(value) for value in record["values"].values() if isinstance(value, list)}) > 1:
        raise ValueError("its samples differ in number")

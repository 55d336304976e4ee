"""The lines of a run's file after its header, checked as they are read: a run may come from anybody."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from labkit.machine import Source
from labkit.machine.load import Load

Status = Literal["ok", "oom", "skipped", "failed", "timeout"]


class Row(BaseModel):
    """Values that a rank has measured; lists are samples."""

    model_config = ConfigDict(strict=True)

    kind: Literal["row"]
    point: str
    rank: int
    values: dict[str, Any]

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if len({len(value) for value in self.values.values() if isinstance(value, list)}) > 1:
            raise ValueError("its samples differ in number")
        return self


class Facts(BaseModel):
    """What ranks report of themselves; labkit calculates with these two and prints the others."""

    model_config = ConfigDict(strict=True, extra="allow")

    world_size: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] = 1


class End(BaseModel):
    """A point is over; with a reason unless it is ok."""

    model_config = ConfigDict(strict=True)

    kind: Literal["end"]
    point: str
    status: Status
    reason: str | None = None
    elapsed_s: float = 0.0
    facts: Facts = Facts()
    load: Load | None = None
    details: str = ""
    """Traceback and output of the rank that failed."""

    @model_validator(mode="after")
    def _check_reason(self) -> Self:
        if (self.reason is None) != (self.status == "ok"):
            raise ValueError("expected a reason unless the status is ok")
        return self


class Again(BaseModel):
    """A point is measured again without an alternative that failed: its rows so far do not count."""

    model_config = ConfigDict(strict=True)

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


Record = Row | End | Again | Resumption
_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def parse_record(line: bytes) -> Record:
    """A line as a record. ValueError in one line if it is none."""
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """ "machine.cores: Input should be a valid integer"."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))

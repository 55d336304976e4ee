"""Parameters of a lab, from a notebook, `--set` or papermill, checked before anything runs."""

import ast
import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

T = TypeVar("T")
# A lab without a size or a rank would measure nothing, and say so only in the end.
Some = Annotated[list[T], Field(min_length=1)]
# Parameters of several labs. Their bounds refuse a slip of the keyboard, before anything starts.
Count = Annotated[int, Field(ge=1, lt=2**31)]
Ranks = Annotated[int, Field(ge=1, le=64)]
SeveralRanks = Annotated[int, Field(ge=2, le=64)]
# At most so many timed calls. Fewer than six give no interval, and so no verdict.
Repeats = Annotated[int, Field(ge=1, le=100_000)]
Gain = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Warmup = Annotated[int, Field(ge=0, le=10_000)]
Sessions = Annotated[int, Field(ge=1, le=20)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
AUTO = "auto"
# "auto": CUDA if there is a GPU.
Device = Literal["auto", "cpu", "cuda"]


def one_of(names: Callable[[], Iterable[str]]) -> AfterValidator:
    """Make a validator for a word among `names()`."""

    def check(value: str) -> str:
        # Asked anew each time: a reader's alternative may have been registered meanwhile.
        valid = list(names())
        if value not in valid:
            raise ValueError(f"expected one of {', '.join(valid)}{nearest(value, valid)}")
        return value

    return AfterValidator(check)


PROFILES = ("smoke", "quick", "paper")
SMALLEST_MODEL = "nano"
SMOKE_REPEATS = 6  # the fewest that give an interval


class ParameterError(ValueError):
    """A parameter that a lab cannot use; a notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:  # IPython calls it
        return [f"{type(self).__name__}: {self}"]


class LabConfig(BaseModel):
    """Parameters of a lab: one subclass per lab, one instance per profile."""

    # Strict: "[2, 4]" is a string, and is refused instead of being read letter by letter.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    budget_s: Seconds | None = None
    """Seconds that a run may take; points that do not fit are left out. None: no limit."""

    @field_validator("*")
    @classmethod
    def _drop_repetitions(cls, value: Any) -> Any:
        # A point that is listed twice is measured once.
        if isinstance(value, list):
            return list(dict.fromkeys(value))
        return value


class TimedConfig(LabConfig):
    """Parameters of every lab that times alternatives in interleaved rounds."""

    warmup: Warmup = 1
    repeats: Repeats = 30
    gain: Gain = 0.1
    """Rounds are as many as show a gain of this share with a power of 80%; 0: `repeats`."""
    rounds_s: Seconds | None = 30.0
    """Seconds that rounds may take, at least six of them; None: no limit."""
    seed: Seed = 0
    timeout_s: Seconds = 300.0
    """Deadline of one point."""


class DeviceConfig(TimedConfig):
    """Parameters of such a lab that runs on a device."""

    device: Device = "auto"


def shorten(config: LabConfig, models: Collection[str] = ()) -> LabConfig:
    """Make the profile `smoke`: the smallest model, one number of each list, and few repeats."""
    fewer = {"repeats": SMOKE_REPEATS, "warmup": 1, "sessions": 1}
    short: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in fewer:
            short[name] = fewer[name]
        elif name in models and value:
            short[name] = [SMALLEST_MODEL]
        elif isinstance(value, list) and value and isinstance(value[0], int | float):
            short[name] = value[:1]
    return config.model_copy(update=short)


def ranks_on_gpus(parameters: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Limit numbers of ranks in parameters to the GPUs; leave them out if there is one GPU."""
    values = {
        name: value for name, value in parameters.items() if gpus > 1 or "world_size" not in name
    }
    for name in values:
        # All GPUs take part in the largest: that is how a reader trains.
        if name.endswith("world_sizes"):
            values[name] = [*(ranks for ranks in values[name] if ranks < gpus), gpus]
        elif name == "world_size":
            values[name] = gpus
    return values


def resolve_config(
    lab: str, profiles: Mapping[str, LabConfig], profile: str, overrides: Mapping[str, Any]
) -> LabConfig:
    """Replace a profile's parameters by `overrides`; None leaves the profile's value.

    ParameterError for an unknown profile or name (with the nearest valid one), a wrong type or
    value.
    """
    if not isinstance(profile, str) or profile not in profiles:
        raise ParameterError(
            f"{lab}: unknown profile {profile!r}{nearest(profile, profiles)}; the profiles are"
            f" {', '.join(profiles)}"
        )
    base = profiles[profile]
    # Before pydantic, which knows no nearest name.
    check_names(lab, overrides, type(base).model_fields)
    changed = {name: value for name, value in overrides.items() if value is not None}
    try:
        return type(base).model_validate(base.model_dump() | changed)
    except ValidationError as error:
        raise ParameterError(f"{lab}: {_describe(error, profile, base)}") from None


def check_names(lab: str, names: Iterable[str], valid: Collection[str]) -> None:
    """ParameterError for the first name that is no parameter."""
    for name in names:
        if name not in valid:
            every = ", ".join(valid)
            raise ParameterError(
                f"{lab}: unknown parameter {name!r}{nearest(name, valid)}; the parameters are"
                f" {every}"
            )


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Parse ["world_sizes=[2, 4]", "dtype=bfloat16"]: values are JSON, Python literals or text."""
    values = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name.strip():
            raise ParameterError(
                f"expected name=value, for example world_sizes=[2,4], got {assignment!r}"
            )
        values[name.strip()] = _parse_value(text.strip())
    return values


def nearest(name: Any, valid: Iterable[str]) -> str:
    """Suggest the most similar valid name, as ` (did you mean 'x'?)`, or nothing."""
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return "".join(f" (did you mean {name!r}?)" for name in close)


def _parse_value(text: str) -> Any:
    # A shell's quotes may be either: true and "gloo" are JSON, True and 'gloo' Python.
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            continue
    return text


def _describe(error: ValidationError, profile: str, base: LabConfig) -> str:
    """Say the first of pydantic's errors in one line, with the value that the profile has."""
    # The first is enough: a union reports one problem per member.
    problem = error.errors(include_url=False)[0]
    name, *positions = [str(part) for part in problem["loc"]] or ["parameters"]
    place = "".join(f" (item {number})" for number in positions[:1])
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    # What was got stands before the suggestion.
    message, hints, hint = message.partition(" (did you mean")
    text = f"parameter {name!r}{place} {message}, got {problem['input']!r:.300}{hints}{hint}"
    value = json.dumps(base.model_dump(mode="json").get(name))
    if value == "null":
        return text
    # Without blanks, as a shell takes it after --set.
    return f"{text}; {profile} has {name}={value.replace(', ', ',')}"

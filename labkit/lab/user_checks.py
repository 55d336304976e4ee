"""Correctness of alternatives: verdicts of a run, checks of a reader's code, and guesses."""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd

from labkit.lab.answers import Check
from labkit.lab.config import ParameterError, nearest
from labkit.lab.declaration import Lab, Task
from labkit.lab.facts import BAD, Answer, Status
from labkit.lab.project import project_root, write_file
from labkit.lab.runs.measure import measure
from labkit.lab.runs.store import Run
from labkit.lab.units import format_factor, labels
from labkit.lab.user_calls import Calls, describe_calls, last_calls, read_calls
from labkit.lab.user_worker import Plugins
from labkit.parallel.launch import RankError, run_ranks

# A point that fails as a whole tells nothing of which alternative did it.
EVERY = "every alternative"
NAME = "mine"
# Of one point, at the smallest sizes: an alternative that takes longer hangs.
DEADLINE_S = 20.0
# Between two ranks there is one route; a wrong order of messages shows with three or four.
RANKS = (2, 3, 4)
SHORTEST = {"repeats": 1, "warmup": 0, "sessions": 1}
# 1,022 elements of float32, which neither three nor four ranks divide evenly.
UNEVEN_BYTES = 4088

# Exit statuses for graders, documented in docs/for-a-class.md.
Verdict = Literal["right", "wrong", "fails", "hangs", "not allowed"]
STATUS: dict[Verdict, int] = {"right": 0, "wrong": 1, "fails": 2, "hangs": 3, "not allowed": 4}


@dataclass(frozen=True)
class Correctness:
    """How one alternative fared on one device, number of ranks and transport."""

    lab: str
    device: str
    ranks: int
    name: str
    status: Status
    reason: str | None = None
    details: str = ""
    """Traceback and last output, if a whole point failed."""
    transport: str = ""
    """Of its messages, if the point has several."""

    @property
    def is_bad(self) -> bool:
        """Whether the alternative is to blame; one that is right but slow, or refused, is not."""
        return self.status in BAD

    @property
    def verdict(self) -> Verdict:
        """The verdict on an alternative that is to blame."""
        if self.status == "wrong":
            return "wrong"
        return "hangs" if self.status == "timeout" else "fails"

    @property
    def title(self) -> str:
        return " over ".join(filter(None, (self.name, self.transport)))


def verdicts(lab: Lab, run: Run) -> Iterator[Correctness]:
    """Yield the status of each alternative by place, and of each point that did not end well."""
    frame = run.frame()
    columns = ["transport", "backend", "device", "world_size", "point", "status", "reason"]
    rows = frame.reindex(columns=columns).astype({"device": object, "transport": object})
    # A lab without devices has GPUs only with NCCL.
    rows["device"] = rows["device"].fillna(rows["backend"].map({"nccl": "cuda"})).fillna("cpu")
    rows["transport"] = rows["transport"].fillna("")
    names = frame.reindex(columns=[*lab.alternatives, "point"]).astype(object)
    # A row has one of the lab's columns; a point that named none is its own alternative.
    rows["name"] = names.bfill(axis=1).iloc[:, 0]
    keys = ["device", "world_size", "transport", "name"]
    for (device, ranks, transport, name), group in rows.groupby(keys):
        status, reason = _worst(group)
        # Where the transport itself is the alternative, it would be named twice.
        if transport == name:
            transport = ""
        yield Correctness(
            lab.name, str(device), int(ranks), str(name), status, reason, transport=transport
        )
    coverage = run.coverage()
    details = {point: text for point, _, text in run.failures()}
    for point in coverage[coverage["status"] != "ok"].to_dict("records"):
        place = str(point.get("device") or "cpu"), int(point["world_size"])
        text = details.get(point["point"], "")
        yield Correctness(lab.name, *place, EVERY, point["status"], point["reason"], text)


def _worst(rows: pd.DataFrame) -> tuple[Status, str | None]:
    """Return the gravest status of an alternative's rows, with its reason."""
    checked = rows.dropna(subset="status")
    if checked.empty:
        return "skipped", "it has no check"
    for status in BAD:
        bad = checked[checked["status"] == status]
        if len(bad):
            return status, bad["reason"].iloc[0]
    if (checked["status"] == "ok").any():
        return "ok", None
    return checked["status"].iloc[0], checked["reason"].iloc[0]


@dataclass(frozen=True, repr=False)
class AlternativeCheck:
    """Result of checking a reader's alternative; true if it is right."""

    verdict: Verdict
    details: str = ""
    """Where it is wrong, what it raises, which rank waits, or what it called."""

    @property
    def status(self) -> int:
        """Exit status for a grader: 0 right, 1 wrong, 2 fails, 3 hangs, 4 not allowed."""
        return STATUS[self.verdict]

    def __bool__(self) -> bool:
        return self.verdict == "right"

    def __repr__(self) -> str:
        return ": ".join(filter(None, (self.verdict, self.details)))


def measure_checks(lab: Lab, wanted: Mapping[str, Any], folder: Path, **options: Any) -> Run:
    """Measure the points of a lab that check results, with those wanted parameters that it has."""
    names = lab.config.model_fields
    settings = {name: value for name, value in wanted.items() if name in names}
    config = lab.configure("smoke", settings)
    return measure(lab.only_checks(), config, profile="smoke", directory=folder, **options)


def check_alternative(lab: Lab, alternative: Callable[..., Any]) -> AlternativeCheck:
    """Check one alternative at the lab's smallest sizes on 2, 3 and 4 ranks, up to a failure.

    Keeps nothing. ParameterError, before anything starts, for a lab that compares nothing of the
    kind, and for a value that is no function.
    """
    if not callable(alternative):
        raise ParameterError(f"{lab.name}: expected a function, got {alternative!r:.80}")
    compare = None if lab.verify is None else lab.verify(alternative)
    world_sizes = RANKS if "world_sizes" in lab.config.model_fields else (1,)
    result = AlternativeCheck("right")
    for world_size in world_sizes:
        if lab.plugin_parameter is not None or compare is None:
            sizes = {"sizes_bytes": [UNEVEN_BYTES], "world_sizes": [world_size]}
            result = _check(lab, alternative, {**SHORTEST, **sizes, "timeout_s": DEADLINE_S})
        # Also if it is wrong: the comparison names the cause, which the lab's check does not know.
        if compare is not None and result.verdict in ("right", "wrong"):
            result = _compare_with_one_process(compare, world_size, result)
        if world_size > 1 and result.details:
            result = replace(result, details=f"{result.details}, on {world_size} ranks")
        if not result:
            break
    return result


def _compare_with_one_process(
    compare: Callable[[], tuple[bool, str]], ranks: int, measured: AlternativeCheck
) -> AlternativeCheck:
    """Return what measuring found, unless a whole training differs from one process."""
    try:
        results = run_ranks(compare, world_size=ranks, timeout_s=DEADLINE_S)
    except RankError as error:
        reason = error.failure.reason
        if error.failure.status == "timeout":
            return AlternativeCheck("hangs", f"{reason}, in {NAME}")
        return AlternativeCheck("fails", reason)
    is_right, text = results[0]
    if is_right:
        return measured
    return AlternativeCheck("wrong", "; ".join(filter(None, [measured.details, text])))


def _check(
    lab: Lab, alternative: Callable[..., Any], wanted: Mapping[str, Any]
) -> AlternativeCheck:
    noted = lab.task.noted if lab.task else ()
    with (
        TemporaryDirectory(prefix="labkit-check-") as folder,
        TemporaryDirectory(prefix="labkit-calls-") as notes,
    ):
        plugins = Plugins({NAME: alternative}, noted=noted, notes=Path(notes))
        run = measure_checks(lab, wanted, Path(folder), plugins=plugins, only_plugins=True)
        waiting = last_calls(Path(notes))
    results = [result for result in verdicts(lab, run) if result.name in (NAME, EVERY)]
    # What is refused or skipped here, such as a dtype, is neither.
    bad = [result for result in results if result.is_bad]
    right = [result for result in results if result.status in ("ok", "too_slow")]
    if not results:
        return AlternativeCheck("fails", "it was not measured")
    if bad or not right:
        first = (bad or results)[0]
        reasons = [str(first.reason)]
        if first.verdict == "hangs":
            reasons += waiting
        return AlternativeCheck(first.verdict, "; ".join(reasons))
    calls = read_calls(run.frame())
    if lab.task is not None:
        reason = not_allowed_reason(lab.task, calls)
        if reason is not None:
            return AlternativeCheck("not allowed", reason)
    slow = [
        f"too slow to time ({result.reason})" for result in right if result.status == "too_slow"
    ]
    return AlternativeCheck("right", "; ".join([*slow[:1], *describe_calls(calls)]))


def check_file(lab: str) -> Path:
    """Return the file of the last `lab.check`, which a student hands in."""
    return project_root() / "data" / "checks" / f"{lab}.json"


def save_check(lab: Lab, alternative: Callable[..., Any], result: AlternativeCheck) -> None:
    """Keep the verdict on an alternative with its code, if that can be read."""
    code = ""
    # Code that is built in, or typed where nothing keeps it, has no source; the verdict counts.
    with suppress(OSError, TypeError):
        code = inspect.getsource(alternative)
    checked = f"{datetime.now(UTC):%FT%TZ}"
    record = {"verdict": result.verdict, "details": result.details, "code": code}
    write_file(check_file(lab.name), json.dumps(record | {"checked": checked}))


def not_allowed_reason(task: Task, calls: Sequence[Calls]) -> str | None:
    """Return how an alternative breaks the rules of a task, or None."""
    counts = Counter[str]()
    for on_rank in calls:
        counts.update(on_rank.calls)
    allowed = ", ".join(task.allowed) or "no communication"
    other = [kind for kind in counts if kind not in task.allowed]
    if other:
        return f"it calls {', '.join(other)}; this task allows {allowed}"
    most = max((on_rank.most_per_pass for on_rank in calls), default=0)
    if task.at_most is not None and most > task.at_most:
        return f"it calls {most} collectives per pass; this task allows {task.at_most}"
    if task.allowed and not counts:
        return "its code sends nothing: something else does the work"
    if task.moves_input and any(on_rank.n_bytes < on_rank.input_bytes for on_rank in calls):
        return "its messages are too short to sum the tensor: something else does the work"
    return None


def check_guesses(guesses: object) -> dict[str, float]:
    """Return guesses that are positive numbers by name. ParameterError otherwise."""
    if not isinstance(guesses, Mapping):
        raise ParameterError(f"guess: expected {{name: seconds}}, got {guesses!r:.80}")
    for name, value in guesses.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ParameterError(f"guess: expected a number above zero for {name!r}, got {value!r}")
    return {str(name): float(value) for name, value in guesses.items()}


def with_guesses(question: Check, answer: Answer, guesses: Mapping[str, float]) -> Answer:
    """Add a column of guesses to the answer, and a note on how far off they are.

    A guess belongs to the row whose name has all its parts: "2 ranks, ring" may stand for "gloo, 2
    ranks, 4 KiB, ring". ParameterError for a guess that belongs to no row or to several.
    """
    if answer.table is None:
        return answer
    table = answer.table.reset_index(drop=True)
    names = labels(table, question.keys(table))
    column = pd.Series(np.nan, index=table.index)
    for guess, value in guesses.items():
        parts = set(guess.split(", "))
        rows = [row for row, name in enumerate(names) if parts <= set(name.split(", "))]
        if not rows:
            raise ParameterError(f"guess: {guess!r} belongs to no row{nearest(guess, names)}")
        if len(rows) > 1:
            raise ParameterError(
                f"guess: {guess!r} belongs to {len(rows)} rows, such as {names[rows[0]]!r}"
            )
        column[rows[0]] = value
    table.insert(list(table.columns).index(question.measured), "your_guess_s", column)
    # Both errors over the guessed rows alone, or the prediction would answer for more.
    guessed = table.dropna(subset="your_guess_s")
    yours = _mean_factor(guessed[question.measured], guessed["your_guess_s"])
    predictions = _mean_factor(guessed[question.measured], guessed[question.predicted])
    note = (
        f"Your guesses are off by a factor of {yours}, the predictions of the same times by"
        f" {predictions}."
    )
    return replace(answer, table=table, remarks=(note,))


def _mean_factor(measured: pd.Series, guessed: pd.Series) -> str:
    """Return by what factor guesses are wrong on average, too large or too small."""
    return format_factor(float(np.exp(np.log(measured / guessed).abs().mean())))

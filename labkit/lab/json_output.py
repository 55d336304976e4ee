"""What commands print with `--json`: one document, described in `docs/for-scripts.md`."""

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from labkit.lab.answers import Compare
from labkit.lab.columns import labels
from labkit.lab.declaration import Lab
from labkit.lab.runs.comparison import LabComparison
from labkit.lab.runs.store import Run
from labkit.machine import describe_machine

FORMAT = 1


def document(command: str, numbers: Iterable[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """The document of a command: where and when it ran, its numbers (`number`), and facts of its own."""
    machine = describe_machine()
    return {
        "format": FORMAT,
        "command": command,
        "labkit": str(machine.source),
        "machine": machine.label,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "numbers": list(numbers),
        **facts,
    }


def number(
    name: str,
    value: float | None,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    validity: str = "ok",
    measured: datetime | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """A number with its interval, unit, validity and age; what is unknown or not finite is null."""
    age_s = None if measured is None else round((datetime.now(UTC) - measured).total_seconds())
    ends = {name: _finite(end) for name, end in (("value", value), ("low", low), ("high", high))}
    return {"name": name, **ends, "unit": unit, "validity": validity, "age_s": age_s, **facts}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def answer_numbers(lab: Lab, run: Run) -> Iterator[dict[str, Any]]:
    """Yield the effect of each answered question of a run, then the ratios that it rests on."""
    results, at = run.results(), run.header.started
    disturbed = f"busy during {len(run.busy)} of {len(run.header.planned)} points"
    validity = f"{disturbed}: {next(iter(run.busy.values()))}" if run.busy else "ok"
    for question in lab.questions:
        answer = question.answer(results)
        facts: dict[str, Any] = {"lab": lab.name, "question": question.id}
        name = f"{lab.name}.{question.id}"
        if answer.verdict == "not measured":
            yield number(name, None, "ratio", validity=answer.headline, measured=at, **facts)
            continue
        said: dict[str, Any] = {"verdict": answer.verdict, "headline": answer.headline, "notes": list(answer.notes)}
        yield number(name, answer.effect, "ratio", validity=validity, measured=at, **facts, **said)
        if not isinstance(question, Compare) or answer.table is None:
            continue
        keys = question.metric.columns
        for where, row in zip(labels(answer.table, keys), answer.table.to_dict("records"), strict=True):
            ends: dict[str, Any] = {"low": row.get("low"), "high": row.get("high")}
            yield number(f"{name}: {where}", row["ratio"], "ratio", **ends, validity=validity, measured=at, **facts)


def comparison_numbers(comparisons: Iterable[LabComparison]) -> Iterator[dict[str, Any]]:
    """Yield every ratio that two runs share: the later run's, beside that of the first one."""
    for comparison in comparisons:
        for pair in comparison.pairs:
            for question, configuration, *ends, difference in pair.ratios.itertuples(index=False, name=None):
                first, first_low, first_high, ratio, low, high = ends
                facts: dict[str, Any] = {
                    "run": pair.name,
                    "first": _finite(first),
                    "first_low": _finite(first_low),
                    "first_high": _finite(first_high),
                }
                name = f"{comparison.lab.name}.{question}: {configuration}, {pair.name}"
                at = pair.run.header.started
                yield number(name, ratio, "ratio", low=low, high=high, validity=difference, measured=at, **facts)


def prediction_numbers(rows: Iterable[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the predicted step time of each row of a table, with its input and the other predictions."""
    for line, row in enumerate(rows, start=1):
        value, low, high = (float(row[name]) if row.get(name) else None for name in ("step_s", "step_low", "step_high"))
        yield number(f"row {line}", value, "s", low=low, high=high, validity=row["note"] or "ok", row=dict(row))

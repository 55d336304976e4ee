"""What commands print with `--json`: one document, described in `docs/for-scripts.md`."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

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

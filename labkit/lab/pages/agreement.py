"""What a page tells the index of quantities that other labs measure, too, and the index's table of them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from labkit.lab.agreement import Agreement, Value, agreement_of, value_of
from labkit.lab.declaration import Lab
from labkit.lab.own_models import without_own
from labkit.lab.rows import TURN
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, format_bytes, format_seconds


@dataclass(frozen=True)
class Row:
    """A quantity with all that was measured of it, and how many times the values are apart."""

    quantity: str
    is_bytes: bool
    values: list[Value]
    verdict: Agreement
    ratio: float


def known_record(study: Lab, run: Run) -> list[dict[str, Any]]:
    """The values of a run that the index compares: key, words, where, value and interval."""
    threads = {point: int(facts["threads"]) for point, facts in run.facts().items() if "threads" in facts}
    found = []
    for known in getattr(study, "known", lambda _: ())(without_own(run.frame())):
        for key, point, samples in known.samples(threads):
            value, low, high = value_of(samples, is_exact=key.is_exact)
            about = {"key": asdict(key) | {"quantity": key.name}, "words": key.words(), "is_bytes": key.is_exact}
            turn = run.header.planned.get(point, {}).get(TURN, 1)
            place = ", ".join(filter(None, (known.place, f"turn {turn}" if turn > 1 else "")))
            told = {"place": place, "value": value, "low": low, "high": high}
            found.append(about | told)
    return found


def agreements(records: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """A row for each quantity that was measured more than once; those that differ first. `records` of pages by lab."""
    groups: dict[tuple[Any, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    for lab, record in records.items():
        for known in record.get("known", []):
            groups.setdefault(tuple(sorted(known["key"].items())), []).append((lab, known))
    rows = []
    for group in groups.values():
        if len(group) > 1:
            values = [_value(lab, known) for lab, known in group]
            first = group[0][1]
            rows.append(Row(first["words"], first["is_bytes"], values, *agreement_of(values)))
    order = ("differ", "agree", "too few repeats")
    return sorted(rows, key=lambda row: (order.index(row.verdict), -row.ratio if row.verdict == "differ" else 0))


def _value(lab: str, known: Mapping[str, Any]) -> Value:
    return Value(lab, known["place"], known["value"], known["low"], known["high"])


def agreement_sentence(rows: Iterable[Row]) -> str:
    """The line above the table."""
    verdicts = [row.verdict for row in rows]
    told = len(verdicts) - verdicts.count("too few repeats")
    counts = f"{verdicts.count('agree')} of {counted(told, 'quantity')}"
    rest = verdicts.count("too few repeats")
    return f"{counts} measured more than once agree." + (f" {rest} had too few repeats to tell." if rest else "")


def agreement_table(rows: list[Row]) -> pd.DataFrame:
    """One row per quantity."""
    cells = [(row.quantity, _verdict(row), " · ".join(_by_lab(row))) for row in rows]
    return pd.DataFrame(cells, columns=["quantity", "agree?", "measured"])


def _by_lab(row: Row) -> list[str]:
    """ "Kernels: 57.1 ms [55.2 ms, 60.3 ms]", of each lab that measured it."""
    labs = dict.fromkeys(value.lab for value in row.values)
    return [f"{lab}: {'; '.join(_told(row, value) for value in row.values if value.lab == lab)}" for lab in labs]


def _verdict(row: Row) -> str:
    return f"differ, {row.ratio:.1f} times" if row.verdict == "differ" else row.verdict


def _told(row: Row, value: Value) -> str:
    """ "57.1 ms [55.2 ms, 60.3 ms] (phases)"."""
    form = format_bytes if row.is_bytes else format_seconds
    interval = "" if value.low is None or value.low == value.high else f" [{form(value.low)}, {form(value.high or 0)}]"
    return f"{form(value.value)}{interval}" + (f" ({value.place})" if value.place else "")

"""What the lab of this machine asks, and how a run answers."""

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from labkit.lab.advise.machine import DEFAULT, JOINED, OF_RANKS, Configuration
from labkit.lab.as_predicted import agreement
from labkit.lab.columns import labels
from labkit.lab.comparing import compared
from labkit.lab.findings import Finding, Questions, troubles
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.runs.store import Run
from labkit.lab.units import join_words

QUESTIONS = Questions()
Runs = Mapping[str, Run]
FIELDS = tuple(Configuration.__dataclass_fields__)
NAMED = dict.fromkeys(FIELDS, "{}") | {"attention": "{} attention", "compiled": "torch.compile", "bucket_mb": "{} MiB"}
AS_PROMISED = 1.1  # what the parts promise, up to this factor
SUBJECT, BASELINE = "the joined configuration", "the default"


@QUESTIONS.ask("gain", "Does what the other labs recommend, all together, beat the default?")
def gain(frame: pd.DataFrame) -> Finding | None:
    ratios, joined = JOINED.over(frame, "default"), _joined(frame)
    found = compared(
        ratios,
        SUBJECT,
        BASELINE,
        axis=("model", "world_size"),
        choose=f"Train with {_changes(joined)}, as labkit advise --apply prints it",
        keep=f"Train {join_words(list(ratios['model'].unique()))} with the defaults",
        caveat=troubles(frame, "implementation"),
    )
    # each part was shown to be faster: what is not shown of all together is no reason against them
    return found if found is None or found.significant else replace(found, advice=None)


@QUESTIONS.ask("ingredients", "What is joined in it?")
def ingredients(frame: pd.DataFrame) -> Finding | None:
    table = _joined(frame)
    if table.empty:
        return None
    where = scope_of(table, JOINED.setting)
    return Finding("measured", f"Other than the default: {_changes(table)}.", table, where=where)


def _joined(frame: pd.DataFrame) -> pd.DataFrame:
    rows = select(frame, [*JOINED.setting, *FIELDS], implementation="joined")
    return rows[[*JOINED.setting, *FIELDS]].drop_duplicates().reset_index(drop=True)


def _changes(table: pd.DataFrame) -> str:
    """ "bfloat16, torch.compile and naive_shared"; by model and ranks where they differ."""
    places: dict[str, list[str]] = {}
    for row in table.to_dict("records"):
        fields = [name for name in FIELDS if row["world_size"] > 1 or name not in OF_RANKS]
        known = {name: row[name] for name in fields if row[name] is not None and row[name] == row[name]}
        told = [NAMED[name].format(value) for name, value in known.items() if value != getattr(DEFAULT, name)]
        places.setdefault(join_words(told) or "nothing", []).append(labels(pd.DataFrame([row]), JOINED.setting)[0])
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{told} for {' and '.join(where)}" for told, where in places.items())


@QUESTIONS.ask("predicted", "Do the gains of the parts predict the gain of the whole?")
def predicted(frame: pd.DataFrame) -> Finding | None:
    ratios = JOINED.over(frame, "default")
    if ratios.empty:
        return None
    expected = frame.groupby(list(JOINED.setting))["expected_ratio"].first().reset_index()
    table = ratios[[*JOINED.setting, "ratio"]].merge(expected, on=list(JOINED.setting))
    table["measured_over_predicted"] = table["ratio"] / table["expected_ratio"]
    promised = "what the gains of the parts promise"
    found = agreement(table, "joined steps", promised, close=AS_PROMISED, settings=JOINED.setting)
    if found is None or found.verdict == "yes":
        return found
    return replace(
        found,
        why="The gains are multiplied as if none changed another, and each was measured alone: autocast and compiling "
        "in one process that had all cores, the wrapper in float32.",
    )

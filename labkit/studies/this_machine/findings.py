"""What the lab of this machine asks, and how a run answers."""

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from labkit.lab.advise.machine import JOINED, Configuration
from labkit.lab.as_predicted import CLOSE, agreement
from labkit.lab.comparing import compared
from labkit.lab.findings import Finding, Questions, troubles
from labkit.lab.rows import select
from labkit.lab.runs.store import Run
from labkit.lab.units import join_words

QUESTIONS = Questions()
Runs = Mapping[str, Run]
FIELDS = tuple(Configuration.__dataclass_fields__)
SUBJECT, BASELINE = "the joined configuration", "the default"


@QUESTIONS.ask("gain", "Does the configuration that all labs recommend together beat the default?")
def gain(frame: pd.DataFrame) -> Finding | None:
    ratios = JOINED.over(frame, "default")
    found = compared(
        ratios,
        SUBJECT,
        BASELINE,
        axis=("model", "world_size"),
        choose="Train as labkit advise --apply prints it",
        keep=f"Train {join_words(list(ratios['model'].unique()))} with the defaults",
        caveat=troubles(frame, "implementation"),
    )
    # each part was shown to be faster: what is not shown of all together is no reason against them
    return found if found is None or found.significant else replace(found, advice=None)


@QUESTIONS.ask("ingredients", "What is joined in it?")
def ingredients(frame: pd.DataFrame) -> Finding | None:
    rows = select(frame, [*JOINED.setting, *FIELDS], implementation="joined")
    if rows.empty:
        return None
    table = rows[[*JOINED.setting, *FIELDS]].drop_duplicates().reset_index(drop=True)
    changed = [name for name in FIELDS if (table[name] != getattr(Configuration(), name)).any()]
    named = [name.replace("_mb", " size") for name in changed if not table[name].isna().all()]
    return Finding("measured", f"Other than the default: {join_words(named) or 'nothing'}.", table)


@QUESTIONS.ask("predicted", "Do the gains of the parts predict the gain of the whole?")
def predicted(frame: pd.DataFrame) -> Finding | None:
    ratios = JOINED.over(frame, "default")
    if ratios.empty:
        return None
    expected = frame.groupby(list(JOINED.setting))["expected_ratio"].first().reset_index()
    table = ratios[[*JOINED.setting, "ratio"]].merge(expected, on=list(JOINED.setting))
    table["measured_over_predicted"] = table["ratio"] / table["expected_ratio"]
    found = agreement(table, "joined steps", "what the gains of the parts promise")
    if found is None or table["measured_over_predicted"].max() <= CLOSE:
        return found
    return replace(
        found,
        why="The gains are multiplied as if none changed another, and each was measured alone: autocast and compiling "
        "in one process that had all cores, the wrapper in float32. What none makes faster weighs more in a faster "
        "step.",
    )

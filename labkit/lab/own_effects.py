"""What a finding also says of a reader's own alternatives, where its question is about labkit's."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pandas as pd

from labkit.lab.comparing import TIME, compared
from labkit.lab.findings import Finding
from labkit.lab.quantities import Quantity


def with_own(
    found: Finding | None,
    ratios: pd.DataFrame,
    alternative: str,
    known: Collection[str],
    baseline: str,
    *,
    axis: Sequence[str] = (),
    quantity: Quantity = TIME,
    names: Callable[[str], str] = lambda name: name.replace("_", " "),
) -> Finding | None:
    """The finding with a sentence in `why`, and effects, for everything in `ratios` that is not `known`.

    `ratios` are over `baseline`, the column `alternative` tells them apart. Alone where nothing else is measured.
    """
    for name, rows in ratios[~ratios[alternative].isin(list(known))].groupby(alternative, sort=False):
        own = compared(rows, names(str(name)), baseline, axis=axis, quantity=quantity)
        if own is None:
            continue
        if found is None or found.verdict == "not measured":
            found = own
            continue
        _, _, sentence = own.headline.rpartition(": ")
        why = " ".join(filter(None, [found.why, f"{sentence[0].upper()}{sentence[1:]}"]))
        found = replace(found, why=why, effects=(*found.effects, *own.effects))
    return found

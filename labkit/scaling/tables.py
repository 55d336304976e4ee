"""The CSV files in `data/reference/scaling/` that hold hardware, models, constants and interval widths."""

import csv
from pathlib import Path

DATA = Path(__file__).parents[1] / "shipped" / "data" / "reference" / "scaling"


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of `name`.csv as texts by column."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))

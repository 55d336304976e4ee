"""How good is the advice on published families of layouts: its proposals against the best measured layout.

    python benchmarks/choose_layouts.py             by published table; writes data/reference/scaling/chosen_layouts.csv
    python benchmarks/choose_layouts.py --families  and prints every family

A family is a model on a number of GPUs with one batch, sequence and precision, of which four layouts or more were
timed. Times are predicted by constants fitted without the model (data/reference/scaling/cross_validated.csv).
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import WITHOUT_MODEL, arrangement, held_out_s, load_published
from labkit.scaling.search import PROPOSED, distinct, preference_s
from labkit.scaling.tables import DATA

MIN_LAYOUTS = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--families", action="store_true", help="also every family")
    families = pd.DataFrame(judge_families())
    if arguments.parse_args().families:
        print(families.to_string())
    columns = ["first", "best_of_three", "smallest_that_fits"]
    finite = families[columns].replace(np.inf, np.nan)
    table = finite.groupby(families["table"]).mean().round(1)
    table["families"] = families.groupby("table").size()
    table["ran_out_of_memory"] = np.isinf(families["best_of_three"]).groupby(families["table"]).sum()
    table.to_csv(DATA / "chosen_layouts.csv")
    print("percent behind the best measured, mean over families")
    print(table.to_string())


def judge_families() -> Iterator[dict[str, object]]:
    """Every family: percent behind its best measured layout; infinite if the layout ran out of memory."""
    published = load_published()
    runs, found, without_model = published.runs, predict_runs(published.runs), held_out_s(WITHOUT_MODEL)
    found = replace(found, step_s=np.where(np.isfinite(without_model), without_model, found.step_s))
    preference = preference_s(found)
    measured = np.where(published.is_ok, published.step_s, np.inf)
    keys = (published.group, published.model, runs.gpus, runs.global_batch, runs.seq_len, runs.precision)
    family = np.array([" ".join(map(str, key)) for key in zip(*keys, strict=True)])
    for name in np.unique(family):
        members = np.flatnonzero(family == name)
        order = [int(row) for row in members[np.argsort(preference[members], kind="stable")] if found.fits[row]]
        if np.isfinite(measured[members]).sum() < MIN_LAYOUTS or not order:
            continue
        chosen = distinct(order, lambda row: (runs.tp[row], runs.pp[row], runs.cp[row], runs.shard[row]), PROPOSED)
        sizes = runs.tp[members] * runs.pp[members]
        smallest = members[np.lexsort((-runs.micro_batch[members], sizes, ~found.fits[members]))[0]]
        winner = int(members[np.nanargmin(measured[members])])
        behind = [100 * (measured[row] / measured[winner] - 1) for row in (*chosen, smallest)]
        yield {
            "table": str(published.group[winner]),
            "family": name,
            "layouts": len(members),
            "first": behind[0],
            "best_of_three": min(behind[:-1]),
            "smallest_that_fits": behind[-1],
            "best_layout": arrangement(runs, winner),
            "first_layout": arrangement(runs, chosen[0]),
        }


if __name__ == "__main__":
    main()

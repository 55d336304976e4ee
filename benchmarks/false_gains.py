"""What `labkit try` says a change gains that changes nothing.

    python benchmarks/false_gains.py                     # ten runs, four minutes on two quiet cores
    python benchmarks/false_gains.py --runs 5 --seed 5   # the second half of these

Exits 1 if more than one run claims a gain or a loss.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import planted_setups

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.runs.measure import measure as measure_lab
from labkit.studies.your_training import changes, lab
from labkit.studies.your_training.changes import Change
from labkit.studies.your_training.gains import describe_gain, gains
from labkit.studies.your_training.worker import measure

NOTHING = "nothing"


def measure_with_nothing(point: Any) -> Iterator[dict[str, Any]]:
    """The lab's worker, with a change that changes nothing."""
    add_nothing()
    return measure(point)


def add_nothing() -> None:
    """Add a change that changes nothing to labkit's."""
    nothing = Change(make=lambda *parts: parts, refusal=lambda training: None, title="")
    # By its module: a rank gets copies of this script's globals.
    changes.CHANGES[NOTHING] = nothing  # type: ignore[index]


def count_false_gains(folder: Path, seeds: range) -> int:
    """Print what the change gains in each run; return the runs that claim a difference."""
    add_nothing()
    study = replace(lab.LAB, worker=measure_with_nothing)
    n_false = 0
    for seed in seeds:
        values = {
            "file": f"{planted_setups.__file__}:attention",
            "arguments": {"is_planted": False},
            "changes": [NOTHING],
            "world_sizes": [],
            "seed": seed,
        }
        config = study.configure("quick", values)
        results = measure_lab(study, config, profile="quick", directory=folder).results()
        (row,) = gains(results).to_dict("records")
        n_false += row["verdict"] != NO_DIFFERENCE_SHOWN
        print(f"run {seed}: {describe_gain(row)}", flush=True)
    return n_false


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.runs)
    with tempfile.TemporaryDirectory() as folder:
        n_false = count_false_gains(Path(folder), seeds)
    print(f"{n_false} false gains or losses in {options.runs} runs")
    # At `FALSE_DISCOVERY_RATE` one false verdict in ten runs may be chance, two hardly ever.
    return int(n_false > 1)


if __name__ == "__main__":
    sys.exit(main())

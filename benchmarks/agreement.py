"""Do two reports of one machine agree? Verdicts per question, side by side, from two folders of
runs.

    labkit report && cp -r data/runs first      # and again: cp -r data/runs second
    python benchmarks/agreement.py first second

A folder has one folder of runs per lab, of which the newest counts. Exits 1 if two verdicts are
opposite, or if fewer than 90% of the verdicts on comparisons agree.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from labkit.lab.answers import Compare
from labkit.lab.compare import Pair, compare_runs
from labkit.lab.runs.store import Run, newest_runs
from labkit.studies import LABS, load_lab

MIN_AGREEMENT = 0.9


def newest_pairs(first: Path, other: Path) -> list[Pair]:
    """Compare the newest whole run of each lab that both folders have, on the points that both
    measured."""
    runs: list[Run] = []
    for lab in LABS:
        both = [next(_whole_runs(folder / lab), None) for folder in (first, other)]
        found = [run for run in both if run is not None]
        if len(found) == 2:
            runs += found
        else:
            print(f"{lab}: not in both folders")
    return compare_runs(runs, load_lab)


def _whole_runs(folder: Path) -> Iterator[Run]:
    return (run for run in newest_runs(folder) if not run.pending and not run.header.is_partial)


def print_agreement(pairs: list[Pair]) -> bool:
    """Print a line per question and the shares; return whether enough agree and none is
    opposite."""
    comparisons = Counter[str]()
    others = Counter[str]()
    for pair in pairs:
        for question, outcome in pair.outcomes().items():
            verdicts = " | ".join(answer.verdict for answer in pair.answers[question])
            busy = ", busy" if any(run.is_busy for run in pair.runs) else ""
            print(f"{outcome:8} {pair.lab.name}.{question}: {verdicts}{busy}")
            is_comparison = isinstance(pair.lab.question(question), Compare)
            (comparisons if is_comparison else others)[outcome] += 1
    for name, counts in (("comparisons", comparisons), ("checks and reports", others)):
        total = counts["agree"] + counts["differ"] + counts["opposite"]
        share = counts["agree"] / max(1, total)
        print(f"{name}: {counts['agree']} of {total} agree ({share:.0%}): {dict(counts)}")
    total = sum(comparisons[outcome] for outcome in ("agree", "differ", "opposite"))
    has_opposite = comparisons["opposite"] + others["opposite"] > 0
    return not has_opposite and comparisons["agree"] >= MIN_AGREEMENT * total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args()
    sys.exit(not print_agreement(newest_pairs(arguments.first, arguments.other)))


if __name__ == "__main__":
    main()

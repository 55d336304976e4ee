"""Do two reports of one machine agree? Verdicts per question, side by side, from two folders of
runs.

    LABKIT_HOME=first labkit report && LABKIT_HOME=second labkit report
    python benchmarks/agreement.py first/data/runs second/data/runs

A folder has one folder of runs per lab, of which the newest counts. A verdict that one of them
lacks ("lost", "gained") does not agree. A question that one of them, or both, leave undecided is
open: more rounds would say whether they agree, so it is counted apart. Exits 1 if two verdicts are
opposite, if fewer than 90% of those on comparisons agree, or if more than a third are open.
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
# Of all comparisons. Reports that decide nothing would agree on all that they decide.
MAX_OPEN = 1 / 3


def newest_pairs(first: Path, other: Path) -> list[Pair]:
    """Compare the newest whole run of each lab that both folders have, on the points that both
    measured."""
    runs: list[Run] = []
    for lab in LABS:
        both = [next(_whole_runs(folder / lab), None) for folder in (first, other)]
        found = [run for run in both if run is not None]
        if len(found) < 2:
            print(f"{lab}: not in both folders")
        elif found[0].header.started == found[1].header.started:
            # It would agree with itself.
            print(f"{lab}: one run in both folders")
        else:
            runs += found
    return compare_runs(runs, load_lab) if runs else []


def _whole_runs(folder: Path) -> Iterator[Run]:
    return (run for run in newest_runs(folder) if not run.pending and not run.header.is_partial)


def print_agreement(pairs: list[Pair]) -> bool:
    """Print a line per question and the shares; return whether enough agree and none is
    opposite."""
    comparisons = Counter[str]()
    others = Counter[str]()
    for pair in pairs:
        for question, outcome in pair.outcomes.items():
            verdicts = [answer.verdict for answer in pair.answers[question]]
            if verdicts == ["undecided", "undecided"]:
                outcome = "open"
            busy = ", busy" if any(run.is_busy for run in pair.runs) else ""
            print(f"{outcome:8} {pair.lab.name}.{question}: {' | '.join(verdicts)}{busy}")
            is_comparison = isinstance(pair.lab.question(question), Compare)
            counts = comparisons if is_comparison else others
            counts[outcome] += 1
    for name, counts in (("comparisons", comparisons), ("checks and reports", others)):
        decided = counts.total() - counts["open"]
        share = counts["agree"] / max(1, decided)
        print(
            f"{name}: {counts['agree']} of {decided} agree ({share:.0%}), {counts['open']} are"
            f" open: {dict(counts)}"
        )
    if comparisons["opposite"] + others["opposite"]:
        return False
    decided = comparisons.total() - comparisons["open"]
    # At least one: two folders without a comparison in common do not agree.
    return (
        comparisons["agree"] >= max(1.0, MIN_AGREEMENT * decided)
        and comparisons["open"] <= MAX_OPEN * comparisons.total()
    )


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

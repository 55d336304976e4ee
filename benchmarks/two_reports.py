"""Whether two reports of one machine find the same: of the significant findings of each, how many the other has.

    python benchmarks/two_reports.py data/first data/second      # exits 1 below 90 %, or if one contradicts the other

Each directory has a folder per lab, as `data/runs`; the newest run of each lab in both is read. A finding is found
again if one of its significant comparisons is significant in the same direction in the other report, and contradicted
if one is in the opposite direction there. Counts of bytes, which always agree, are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from labkit.lab.findings import Finding
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab

LEAST_AGAIN = 0.90
OPPOSITE = {"faster": "slower", "slower": "faster"}
AGAIN, NOT_SHOWN, CONTRADICTED = "found again", "not shown", "contradicted"
OUTCOMES = (AGAIN, NOT_SHOWN, CONTRADICTED)

Comparisons = dict[tuple[object, ...], str]
"""Verdict by question, subject, baseline, quantity, setting, and which of several with these names it is."""


@dataclass(frozen=True)
class Tally:
    """What becomes of one report's significant findings, and of their comparisons, in the other: counts by outcome."""

    findings: Counter[str]
    comparisons: Counter[str]

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.findings + other.findings, self.comparisons + other.comparisons)


def comparisons_of(findings: dict[str, Finding]) -> Comparisons:
    """All that were measured with noise."""
    found: Comparisons = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for question, finding in findings.items():
        for effect in finding.effects:
            if effect.low < effect.high:
                name = (question, effect.subject, effect.baseline, effect.quantity, effect.setting)
                found[*name, seen[name]] = effect.verdict
                seen[name] += 1
    return found


def looked_for(first: Comparisons, second: Comparisons) -> Tally:
    """Of what is significant in the first, what the second says."""
    outcomes: dict[str, Counter[str]] = {}
    for name, verdict in first.items():
        if verdict in OPPOSITE:
            there = second.get(name)
            outcome = AGAIN if there == verdict else CONTRADICTED if there == OPPOSITE[verdict] else NOT_SHOWN
            outcomes.setdefault(str(name[0]), Counter())[outcome] += 1
    of_findings = Counter(
        CONTRADICTED if of_one[CONTRADICTED] else AGAIN if of_one[AGAIN] else NOT_SHOWN for of_one in outcomes.values()
    )
    return Tally(of_findings, sum(outcomes.values(), Counter()))


def newest(directory: Path, lab: str) -> Run | None:
    """The last run of a lab, by its name; None without one."""
    paths = sorted((directory / lab).glob("*.jsonl"))
    return Run.load(paths[-1]) if paths else None


def _findings(run: Run) -> dict[str, Finding]:
    return load_lab(run.header.lab).findings(run.frame(), run.coverage(), run.header.calibration)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    asked = parser.parse_args()
    for directory in (asked.first, asked.second):
        if not directory.is_dir():
            parser.error(f"expected a directory with a folder per lab, got {directory}")
    sums = [Tally(Counter(), Counter()), Tally(Counter(), Counter())]
    heading = "".join(f"{outcome:>13}" for outcome in OUTCOMES)
    print(f"{'findings of':<18}{'in':<8}{heading}   {'comparisons':>13}{heading}")
    for lab in LABS:
        runs = newest(asked.first, lab), newest(asked.second, lab)
        if runs[0] is None or runs[1] is None:
            print(f"{lab:<18}no run in {asked.first if runs[0] is None else asked.second}")
            continue
        one, other = (comparisons_of(_findings(run)) for run in runs if run is not None)
        for index, tally in enumerate((looked_for(one, other), looked_for(other, one))):
            sums[index] += tally
            _show(lab, index, tally)
    kept = True
    for index, tally in enumerate(sums):
        _show("all", index, tally)
        share = tally.findings[AGAIN] / max(1, tally.findings.total())
        kept &= share >= LEAST_AGAIN and not tally.findings[CONTRADICTED]
        print(f"{share:.0%} of the {tally.findings.total()} significant findings of one are found by the other")
    return 0 if kept else 1


def _show(lab: str, index: int, tally: Tally) -> None:
    counts = ["".join(f"{of[outcome]:>13}" for outcome in OUTCOMES) for of in (tally.findings, tally.comparisons)]
    print(f"{lab:<18}{('second', 'first')[index]:<8}{counts[0]}   {tally.comparisons.total():>13}{counts[1]}")


if __name__ == "__main__":
    sys.exit(main())

"""The bounds of the benchmarks; nothing is timed."""

import re
import runpy
import shutil
from pathlib import Path

from labkit.lab.project import recorded_directory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_bound_is_met_or_missed_by_its_pair_alone():
    against = runpy.run_path(str(BENCHMARKS / "against_torch.py"))
    times = {"labkit": [2.9] * 9, "torch": [3.0] * 9, "plain": [1.0] * 9}
    for bound, word in ((1.0, "at most 1.00: met"), (0.5, "at most 0.50: MISSED")):
        pairs = {("labkit", "torch"): bound, ("labkit", "plain"): None}
        contest = against["Contest"]("x", {}, pairs)
        (line, missed), (other, is_other_missed) = (
            against["_line"](contest, pair, times, 1e9) for pair in pairs
        )
        assert (word in line, missed) == (True, bound < 0.9)
        assert ("at most" in other, is_other_missed) == (False, False)


def test_reports_agree_with_themselves_and_not_with_the_opposite(tmp_path, capsys):
    agreement = runpy.run_path(str(BENCHMARKS / "agreement.py"))
    for name in ("first", "itself", "same", "swapped"):
        shutil.copytree(recorded_directory() / "tuned_step", tmp_path / name / "tuned_step")
        (run,) = (tmp_path / name).glob("*/*.jsonl")
        text = run.read_text()
        if name in ("same", "swapped"):  # of another start
            text = re.sub(r'"started": ?"\d{4}', '"started":"2001', text, count=1)
        if name == "swapped":
            text = text.replace('"joined"', '"-"').replace('"default"', '"joined"')
            text = text.replace('"-"', '"default"')
        run.write_text(text)
    for other, agrees in (("same", True), ("swapped", False), ("itself", False)):
        pairs = agreement["newest_pairs"](tmp_path / "first", tmp_path / other)
        assert agreement["print_agreement"](pairs) is agrees
    assert "opposite tuned_step.gain" in capsys.readouterr().out


def test_a_planted_cause_is_met_by_its_name_and_a_true_size_that_stayed():
    planted = runpy.run_path(str(BENCHMARKS / "planted_causes.py"))
    judge = planted["judge"]
    found = planted["Named"]("input", 0.020)
    assert judge(found, "input", 0.020, 0.022) == "met"
    assert judge(found, "input", 0.030, 0.030) == "MISSED"
    assert judge(found, "another", 0.020, 0.020) == "MISSED"
    assert judge(found, "input", 0.020, 0.010).startswith("undecided")

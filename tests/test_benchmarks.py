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


def test_a_planted_cause_is_met_by_its_name_and_its_size_in_most_runs():
    planted = runpy.run_path(str(BENCHMARKS / "planted_causes.py"))
    named = planted["Named"]

    def verdict(*found, step_s=0.05, expected="input"):
        true = planted["TrueSize"](0.020 if expected else 0.0, 0.05)
        attempts = [planted["Attempt"](named(*one), step_s, true) for one in found]
        return planted["judge"](attempts, expected).partition(":")[0]

    right = ("input", 0.021)
    assert verdict(right, right, ("input", 0.040)) == "met"
    assert verdict(right, ("input", 0.030), ("input", 0.030)) == "MISSED"
    assert verdict(right, ("another", 0.020), ("another", 0.020)) == "MISSED"
    # Slower cores slow the cause and the step alike, to a limit.
    assert verdict(("input", 0.022), step_s=0.055) == "met"
    assert verdict(("input", 0.040), step_s=0.1) == "undecided"
    assert verdict(("", 0.0), expected="") == "met"
    assert verdict(("", 0.004), expected="") == "MISSED"

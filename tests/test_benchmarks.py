"""What benchmarks say of bounds and of reports; nothing is timed."""

import runpy
import sys
from pathlib import Path

import pandas as pd
import pytest

from labkit.lab.findings import Effect, Finding
from labkit.lab.project import recorded_directory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TWO_REPORTS = BENCHMARKS / "two_reports.py"


def test_a_bound_is_met_or_missed_by_its_pair_alone():
    against = runpy.run_path(str(BENCHMARKS / "against_torch.py"))
    times = {"labkit": [2.9] * 9, "torch": [3.0] * 9, "plain": [1.0] * 9}
    pairs = [("labkit", "torch"), ("labkit", "plain")]
    for bound, word in ((1.0, "at most 1.00: met"), (0.5, "at most 0.50: MISSED")):
        contest = against["Contest"]("x", {}, pairs, {"labkit / torch": bound})
        (line, missed), (other, is_other_missed) = (against["_line"](contest, pair, times, 1e9) for pair in pairs)
        assert (word in line, missed) == (True, bound < 0.9)
        assert ("at most" in other, is_other_missed) == (False, False)


def _effect(verdict, setting="small", *, exact=False):
    low, high = (0.5, 0.5) if exact else (0.4, 0.6)
    return Effect("the ring", "torch", setting, "time", 0.5, low, high, verdict)


def _told(*effects):
    return Finding("yes", "Yes.", pd.DataFrame(), effects=effects, significant=True)


def test_findings_of_one_report_are_found_again_not_shown_or_contradicted_by_another():
    two = runpy.run_path(str(TWO_REPORTS))
    nothing = "no difference shown"
    first = two["comparisons_of"](
        {
            "again": _told(_effect("faster"), _effect("faster", "large")),
            "not": _told(_effect("slower")),
            "against": _told(_effect("faster"), _effect("slower", "large")),
            "nothing": _told(_effect(nothing)),
            "counted": _told(_effect("faster", exact=True)),
        }
    )
    second = two["comparisons_of"](
        {
            "again": _told(_effect("faster"), _effect(nothing, "large")),
            "not": _told(_effect(nothing)),
            "against": _told(_effect("faster"), _effect("faster", "large")),
            "nothing": _told(_effect("faster")),
        }
    )
    there, back = two["looked_for"](first, second), two["looked_for"](second, first)
    assert dict(there.findings) == {"found again": 1, "not shown": 1, "contradicted": 1}
    assert dict(there.comparisons) == {"found again": 2, "not shown": 2, "contradicted": 1}
    assert dict(back.findings) == {"found again": 1, "not shown": 1, "contradicted": 1}


def test_a_report_agrees_with_itself_and_a_missing_lab_is_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "kernels").symlink_to(recorded_directory() / "kernels")
    monkeypatch.setattr(sys, "argv", [TWO_REPORTS.name, str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit) as exit_of:
        runpy.run_path(str(TWO_REPORTS), run_name="__main__")
    said = capsys.readouterr().out
    assert exit_of.value.code == 0
    assert "100% of the" in said
    assert "no run in" in said

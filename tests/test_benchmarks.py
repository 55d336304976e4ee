"""The bounds of the benchmarks; nothing is timed."""

import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

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


def test_reports_that_leave_much_undecided_do_not_agree():
    agreement = runpy.run_path(str(BENCHMARKS / "agreement.py"))
    comparison = agreement["Compare"](id="q", text="?", metric=None, baseline="base")

    def agrees(n_open):
        outcomes = {f"q{i}": "open" if i < n_open else "agree" for i in range(10)}
        pair = SimpleNamespace(
            outcomes=outcomes,
            answers={name: [SimpleNamespace(verdict="yes")] * 2 for name in outcomes},
            lab=SimpleNamespace(name="lab", question=lambda name: comparison),
            runs=[],
        )
        return agreement["print_agreement"]([pair])

    assert agrees(3)
    assert not agrees(4)


def test_a_planted_cause_is_met_by_its_name_and_its_size_in_most_runs(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # where a script finds its neighbors
    planted = runpy.run_path(str(BENCHMARKS / "planted_causes.py"))

    def verdict(*named, step_ratio=1.0, expected="input"):
        true_share = 0.4 if expected else 0.0
        attempts = [
            planted["Attempt"](planted["Named"](*one), true_share, step_ratio) for one in named
        ]
        return planted["judge"](attempts, expected).partition(":")[0]

    right = ("input", 0.42)
    assert verdict(right, right, ("input", 0.8)) == "met"
    assert verdict(right, ("input", 0.6), ("input", 0.6)) == "MISSED"
    assert verdict(right, ("another", 0.4), ("another", 0.4)) == "MISSED"
    assert verdict(right, step_ratio=1.2) == "MISSED"
    assert verdict(("", 0.0), expected="") == "met"
    assert verdict(("", 0.08), expected="") == "MISSED"
